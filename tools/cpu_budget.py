"""A pytest plug-in that prints the CPU time of the tests of each folder beside its budget: ``-p tools.cpu_budget``.

Processes that a test starts are counted. The budgets are the table of CONTRIBUTING.md; nothing fails over one.
``CPU_COSTS=FILE`` also writes the seconds of each test file, as JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

BUDGETS = Path(__file__).parent.parent / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `(tests[\w/]*)` \| (\d+) \|", re.MULTILINE)
START = "start, imports and collection"


def cpu_s() -> float:
    """CPU seconds of this process and of all that descend from it, with those that ended and were waited for.

    A process that outlives its parent is lost; nothing in the tests is meant to.
    """
    me, spent_s = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            spent_s += sum(process.cpu_times()[:4])
    return spent_s


def folder_of(file: str) -> str:
    """``tests/cli`` of ``tests/cli/test_init.py``; ``tests`` of a file that lies directly there."""
    return "/".join(file.split("/")[:-1][:2])


def budgets(page: str) -> dict[str, int]:
    """CPU seconds by folder, as a page's table has them."""
    return {folder: int(seconds) for folder, seconds in ROW.findall(page)}


def lines_of(spent_s: Mapping[str, float], allowed_s: Mapping[str, int]) -> list[str]:
    """A line for each folder, the dearest first, and the sum. spent_s: by test file."""
    by_folder = Counter[str]()
    for file, seconds in spent_s.items():
        by_folder[file if file == START else folder_of(file)] += seconds  # type: ignore[assignment]
    lines = [
        f"{folder:<32}{seconds:8.1f} s" + (f" of {allowed_s[folder]} s" if folder in allowed_s else "")
        for folder, seconds in by_folder.most_common()
    ]
    return [*lines, f"{'all':<32}{sum(spent_s.values()):8.1f} s of {sum(allowed_s.values())} s"]


class Costs:
    """What each test file cost so far. The clock is read where the file changes: reading it is not free."""

    def __init__(self) -> None:
        self.spent_s, self.file, self.at_s = Counter[str](), START, 0.0

    def turn_to(self, file: str) -> None:
        """What was spent since the last call belongs to the file before."""
        if file != self.file:
            now_s = cpu_s()
            self.spent_s[self.file] += max(now_s - self.at_s, 0.0)  # type: ignore[assignment]
            self.file, self.at_s = file, now_s

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        self.turn_to(item.nodeid.partition("::")[0])
        yield

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        # What starts the processes of xdist would count them a second time.
        if output is None and session.config.getoption("dist", "no") != "no":
            return
        self.turn_to("")
        if output is not None:
            output["cpu_costs"] = dict(self.spent_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.spent_s.update(getattr(node, "workeroutput", {}).get("cpu_costs", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent_s = {file: seconds for file, seconds in self.spent_s.items() if file}
        if path := os.environ.get("CPU_COSTS"):
            Path(path).write_text(json.dumps(spent_s, indent=1), encoding="utf-8")
        terminalreporter.section("CPU time by folder, and its budget in CONTRIBUTING.md")
        for line in lines_of(spent_s, budgets(BUDGETS.read_text(encoding="utf-8"))):
            terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "cpu costs")
