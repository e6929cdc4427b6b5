"""What a long study has done so far, a line for each part, so that it can be made in pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.errors import SpecError
from harness.outputs import write_atomic


class Kept:
    """Values of parts by their key, in a file of a folder; without a folder nothing is kept.

    sources: files whose text decides the values. SpecError where the folder holds values of other texts.
    """

    def __init__(self, folder: Path | None, sources: Sequence[Path]) -> None:
        self._file = None if folder is None else folder / "kept.jsonl"
        self._values: dict[str, Any] = {}
        if self._file is None:
            return
        code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        if self._file.is_file():
            # A line without an end was being written when the study was stopped.
            whole = self._file.read_text(encoding="utf-8").rpartition("\n")[0]
            self._values = dict(json.loads(line) for line in whole.splitlines())
            write_atomic(self._file, [f"{whole}\n".encode()], what="what is kept")
        else:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._write("code", code)
        if self._values.get("code") != code:
            raise SpecError("holds what other code made", where=str(self._file), hint="Give an empty folder")

    def value(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of a part: as it was kept, else made now."""
        if key not in self._values:
            self._write(key, make())
        return self._values[key]

    def _write(self, key: str, value: Any) -> None:
        self._values[key] = value
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")
