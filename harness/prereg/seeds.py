"""The base seeds that were ever used, from the files and the history of the repository.

A seed counts as used when a plan, experiment, search, calibration or frozen file below plans/ names it, now or in any
commit, or when a sealed run or a search had it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.errors import SpecError
from harness.prereg.repository import Repository
from harness.records import layout
from harness.records.manifest import table_at
from harness.spec import load_toml

SEED_KEY = re.compile(r"(?:^|_)seeds?$")
SEED_LINE = re.compile(r"""^\+\s*"?(\w*seeds?)"?\s*[=:]\s*(\[[\d,\s]*\]?|\d+)""")
# Seeds of resampling draw no input.
NOT_INPUTS = ("rules", "criteria", "interval")
PLANS = "plans"
HISTORY = (f"{PLANS}/*.toml", f"{PLANS}/*.json")
RULE_FILES = f"{PLANS}/rules/"
# The search space that `harness search` keeps beside its ledger.
SEARCH_FILE = "search.json"


class SeedUse(NamedTuple):
    """One place that used a seed."""

    seed: int
    where: str

    def __str__(self) -> str:
        return f"{self.seed} ({self.where})"


def used_seeds(
    repository: Repository, *, leave_out: Iterable[Path] = (), runs_root: Path | None = None
) -> list[SeedUse]:
    """Every use of a seed, the files of ``leave_out`` not counted.

    runs_root: also count the seeds of the sealed runs below it.
    """
    hidden = {repository.relative(path) for path in leave_out}
    uses = [*_in_tree(repository, hidden), *_in_history(repository, hidden)]
    if runs_root is not None:
        uses += _in_runs(runs_root)
    return sorted(set(uses))


def _in_tree(repository: Repository, hidden: set[str]) -> Iterator[SeedUse]:
    folder = repository.root / PLANS
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = repository.relative(path)
        if name in hidden or name.startswith(RULE_FILES) or not path.is_file():
            continue
        for seed in seeds_in(_content(path)):
            yield SeedUse(seed, name)


def _content(path: Path) -> Any:
    try:
        if path.suffix == ".toml":
            return load_toml(path)
        if path.suffix == ".json":
            return json.loads(path.read_bytes())
        if path.suffix == ".jsonl":
            # Plans and ledgers: what decides them is in the first line.
            with open(path, "rb") as lines:
                return json.loads(lines.readline())
    except (SpecError, ValueError, OSError, RecursionError):
        # A file that cannot be read cannot have been run either; a command that uses it reports the error.
        return None
    return None


def seeds_in(content: Any) -> Iterator[int]:
    """Whole numbers below keys that are called seed, seeds or end in _seed or _seeds, at any depth."""
    left: list[tuple[Any, bool]] = [(content, False)]
    while left:
        value, is_seed = left.pop()
        if isinstance(value, Mapping):
            for key, item in reversed([*table_at(value).items()]):
                is_below = is_seed or bool(SEED_KEY.search(key))
                if is_below or key not in NOT_INPUTS:
                    left.append((item, is_below))
        elif isinstance(value, list):
            left += [(item, is_seed) for item in reversed(cast("list[Any]", value))]
        elif is_seed and isinstance(value, int) and not isinstance(value, bool):
            yield value


def _in_history(repository: Repository, hidden: set[str]) -> Iterator[SeedUse]:
    commit = path = ""
    for line in repository.history(*HISTORY).splitlines():
        if line.startswith("commit "):
            commit = line.split()[1][:12]
        elif line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif path not in hidden and not path.startswith(RULE_FILES) and (found := SEED_LINE.match(line)):
            for number in re.findall(r"\d+", found.group(2)):
                yield SeedUse(int(number), f"{path} in commit {commit}")


def _in_runs(runs_root: Path) -> Iterator[SeedUse]:
    """Exploratory sealed runs, calibrations among them, and searches below a folder, however deep they lie."""
    if not runs_root.is_dir():
        return
    for path in sorted(runs_root.rglob(SEARCH_FILE)):
        for seed in seeds_in(_content(path)):
            yield SeedUse(seed, f"search {path.parent.relative_to(runs_root).as_posix()}")
    for path in sorted(runs_root.rglob(layout.MANIFEST)):
        manifest = table_at(_content(path))
        seed = table_at(manifest, "requested", "experiment").get("base_seed")
        if isinstance(seed, int) and manifest.get("preregistration") is None:
            yield SeedUse(seed, f"exploratory run {path.parent.relative_to(runs_root).as_posix()}")
