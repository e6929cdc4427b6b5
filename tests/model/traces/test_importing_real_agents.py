"""What real agents wrote beside what the server that answered them saw: requests, tokens and waits are the same.

``make agents`` makes such recordings anew, with the newest releases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.agents import truth

RECORDINGS = Path(truth.__file__).parent / "recordings"
FOLDERS = sorted(folder for folder in RECORDINGS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_import_is_what_the_server_saw(folder: Path) -> None:
    document = json.loads((folder / "truth.json").read_text())
    logs = sorted(path for path in folder.iterdir() if path.name != "truth.json")
    found, off_s = truth.differences(truth.seen_in(document), logs, document["format"])
    assert not found, "\n".join(map(str, found))
    assert off_s, "a recording without waits holds a reader to nothing"
