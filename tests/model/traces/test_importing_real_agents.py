"""What real agents wrote beside what the server that answered them saw: requests, tokens and waits are the same.

``make agents`` makes such recordings anew, with the newest releases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.agents import truth

RECORDINGS = Path(truth.__file__).parent / "recordings"
READER_FALLS_SHORT: dict[str, str] = {}


def recorded() -> list[object]:
    """The folder of each recording; a reader that is known to fall short is held to fail."""
    marks = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in READER_FALLS_SHORT.items()}
    folders = sorted(folder for folder in RECORDINGS.iterdir() if folder.is_dir())
    return [pytest.param(it, id=it.name, marks=[marks[it.name]] if it.name in marks else []) for it in folders]


@pytest.mark.parametrize("folder", recorded())
def test_an_import_is_what_the_server_saw(folder: Path) -> None:
    document = json.loads((folder / "truth.json").read_text())
    logs = sorted(path for path in folder.iterdir() if path.name != "truth.json")
    found, off_s = truth.differences(truth.seen_in(document), logs, document["format"])
    assert not found, "\n".join(map(str, found))
    assert off_s, "a recording without waits holds a reader to nothing"
