"""The one folder of a tune: what it was asked, what its search found, and what was frozen before the candidates ran.

Each file is written whole or not at all, so that an interrupted tune goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from harness.clock import utc_now
from harness.errors import RecordsError, SpecError
from harness.measure.records.run import SealedRun
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.model.spec.base import tomllib
from harness.outputs import check_runs_folder, write_atomic
from harness.tune.explore import Explored
from harness.tune.setups import Setup
from harness.tune.targets import Capacity

FORMAT = 2
ASKED, EXPLORED, FROZEN = "tune.json", "explored.json", "frozen.json"
CONFIRM, TUNED, PAGE = "confirm.toml", "tuned.toml", "tune.html"
CAPACITIES = "agents.json"
STAGE = "stage.txt"
_EXPLORED, _CAPACITIES = TypeAdapter(Explored), TypeAdapter(list[tuple[str, Setup, int]])
T = TypeVar("T")
_OTHER = "Give another folder with --runs, or rename the experiment"


@dataclass(frozen=True)
class TuneFolder:
    """The folder of one tune, RUNS/NAME-tune: runs of the experiment itself lie beside it."""

    path: Path

    @classmethod
    def begun(cls, runs: Path, name: str, asked: Mapping[str, Any]) -> TuneFolder:
        """The folder of a tune that asks this; SpecError where it holds other runs, or a tune that asked otherwise."""
        folder = cls(check_runs_folder(runs) / folder_name(name))
        file = folder.path / ASKED
        if not file.is_file():
            folder._write(ASKED, asked)
            return folder
        if (before := folder._read(ASKED)) != json.loads(json.dumps(asked)):
            changed = sorted(key for key in {*before, *asked} if before.get(key) != asked.get(key))
            raise SpecError(
                f"holds a tune that asked otherwise ({', '.join(changed)} differ)", where=str(folder.path), hint=_OTHER
            )
        return folder

    @classmethod
    def below(cls, runs: Path) -> list[TuneFolder]:
        """The tunes in a folder of runs, by name; the folder itself may be one."""
        return [cls(file.parent) for file in sorted([*runs.glob(ASKED), *runs.glob(f"*/{ASKED}")])]

    @property
    def stage(self) -> str:
        """What is being done, or was done last: "confirm", "done: keep"; "" before the first stage."""
        path = self.path / STAGE
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def begin(self, stage: str) -> None:
        """Note a stage for ``harness watch``; until the last one ends there is no answer."""
        for name in (TUNED, PAGE):
            (self.path / name).unlink(missing_ok=True)
        self.write_text(STAGE, f"{stage}\n")

    def end(self, state: str, tuned: str, page: str) -> None:
        """Write the answer."""
        self.write_text(PAGE, page)
        self.write_text(TUNED, tuned)
        self.write_text(STAGE, f"done: {state}\n")

    def explored(self) -> Explored | None:
        """What the search found; None before it ended."""
        return self._value(EXPLORED, _EXPLORED) if (self.path / EXPLORED).is_file() else None

    def keep_explored(self, found: Explored) -> Explored:
        """Write what a search found; returns it as it will be read again."""
        self._write(EXPLORED, {"found": _EXPLORED.dump_python(found, mode="json")})
        return self._value(EXPLORED, _EXPLORED)

    def forget(self) -> None:
        """Remove what a search found before any run, which may show other costs and settings."""
        if self.frozen() is None:
            for name in (EXPLORED, CAPACITIES):
                (self.path / name).unlink(missing_ok=True)

    def capacities(self, find: Callable[[], Sequence[Capacity]]) -> list[Capacity]:
        """The predicted numbers of agents; found once, and read ever after."""
        if not (self.path / CAPACITIES).is_file():
            found = [(each.name, each.setup, each.predicted) for each in find()]
            self._write(CAPACITIES, {"found": _CAPACITIES.dump_python(found, mode="json")})
        return [Capacity(*each) for each in self._value(CAPACITIES, _CAPACITIES)]

    def places(self, key: str) -> dict[str, str]:
        """Values of this key of [server] by candidate, in the measurement that was fixed; empty before that."""
        if self.frozen() is None:
            return {}
        fixed = [self.kept_experiment(name, "") for name in (CONFIRM, "agents-1.toml") if (self.path / name).is_file()]
        keys = (key, "step_log") if key == "url" else (key,)
        conditions = [one for spec in fixed for one in spec.condition if one.server.get(key)]
        return {
            one.name.partition("-")[0]: ",".join(one.server[each] for each in keys if one.server.get(each))
            for one in conditions
        }

    def frozen(self) -> dict[str, Any] | None:
        """What was fixed before the candidates ran; None before that. RecordsError where a part of it was changed."""
        if not (self.path / FROZEN).is_file():
            return None
        table = self._read(FROZEN)
        for name, sha256 in cast("Mapping[str, str]", table.get("sha256", {})).items():
            if self.sha256(name) != sha256:
                hint = "Restore it from a copy, or begin anew in another folder"
                raise RecordsError("was changed after it was frozen", where=str(self.path / name), hint=hint)
        return table

    def check_frozen(self, runs: Iterable[SealedRun]) -> str:
        """The hash of what was fixed, which is in each run that was made after that; RecordsError for another one."""
        now = self.sha256(FROZEN)
        for run in runs:
            if run.manifest.requested.get("fixed_by", now) != now:
                hint = "Restore it from a copy, or begin anew in another folder"
                what = f"was changed after run {run.label}, which has another hash of it"
                raise RecordsError(what, where=str(self.path / FROZEN), hint=hint)
        return now

    def freeze(self, table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Fix a table, and the files of these names as they are now."""
        now = utc_now().isoformat(timespec="seconds")
        fixed = {"frozen_at_utc": now, **table, "sha256": {name: self.sha256(name) for name in names}}
        self._write(FROZEN, fixed)
        return fixed

    def kept_experiment(self, name: str, text: str) -> ExperimentSpec:
        """The experiment of this file, which is written where it is not there yet."""
        path = self.path / name
        if not path.is_file():
            self.write_text(name, text)
        return parse_experiment(tomllib.loads(path.read_text(encoding="utf-8")), where=str(path))

    def write_text(self, name: str, text: str) -> Path:
        return write_atomic(self.path / name, [text.encode()], what="a file of the tune")

    def sha256(self, name: str) -> str:
        """Of a file's bytes; "" where there is none."""
        path = self.path / name
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    def _write(self, name: str, table: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps({"format": FORMAT, **table}, indent=1) + "\n")

    def _value(self, name: str, form: TypeAdapter[T]) -> T:
        """What a stage found; RecordsError where the file is not that."""
        try:
            return form.validate_python(self._read(name).get("found"))
        except ValidationError as error:
            hint = "Remove it: its stage is made anew"
            raise RecordsError("is damaged", where=str(self.path / name), hint=hint) from error

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            table: Any = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise RecordsError("is damaged", where=str(path), hint="Remove it: its stage is made anew") from error
        if not isinstance(table, dict) or cast("dict[str, Any]", table).pop("format", 0) != FORMAT:
            hint = "Use the version of the harness that wrote it, or another folder"
            raise RecordsError(f"is not of format {FORMAT}", where=str(path), hint=hint)
        return cast("dict[str, Any]", table)


def folder_name(name: str) -> str:
    """The name of the folder for the experiment of this name."""
    return f"{name}-tune"
