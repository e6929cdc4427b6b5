"""What all tests share: no deadlines, and the installed twin; where there is none, tests that need it are skipped."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling

from harness.errors import HarnessError
from harness.extras.twin.environment import TwinEnvironment, find_twin
from tests.support.stack_servers import share_stacks

# No verdict hangs on how fast a machine is. Half of the usual examples: each run of the tests draws others.
settings.register_profile("no deadline", settings(), deadline=None, max_examples=50)
settings.load_profile("no deadline")
# Processes of xdist say that a pipe is 80 columns wide, and lines fold there.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest) -> TwinEnvironment:
    """A twin of this checkout: the newest stable one, or that of the version which a test is parametrised with.

    Its servers are forked from a process that has loaded the stack (``stack_servers``), and fork the engine's process.
    As users serve, by ``spawn``, does ``test_twin_as_stack``.
    """
    share_stacks()
    try:
        return find_twin(getattr(request, "param", None))
    except HarnessError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Temporary files of tests and of their processes lie in pytest's own folder, of which it keeps the last three.

    The processes of xdist end without what is to be done at exit. The path is short: sockets lie in it too.
    """
    folder = tmp_path_factory.getbasetemp() / "t"
    folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """See ``tests.support.patience`` and ``forked_children``."""
    from tests.support.forked_children import fork_children
    from tests.support.patience import be_patient

    fork_children()
    be_patient()


@pytest.fixture(scope="session", autouse=True)
def bare_reports() -> None:
    """See ``tests.support.bare_reports``."""
    from tests.support.bare_reports import leave_out

    leave_out()


class _OneProcessPerServer(LoadGroupScheduling):
    """``--dist loadgroup``: the tests that share a server of the twin run in one process, which starts it once.

    Other tests of the twin run wherever a process is free; all else by file, since runs are shared by file.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        if file.endswith("test_twin_shapes.py"):
            return f"{file} {name.rpartition('-')[2]}"
        return nodeid if "twin" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    return _OneProcessPerServer(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(scope="module", autouse=True)
def what_is_loaded_stays(patience: None) -> None:
    """As ``pytest_collection``, of what tests have loaded since then."""
    del patience
    gc.freeze()


# Packages that count what is left of them at the end would call what is frozen a leak.
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No garbage collection, with one of which each replay begins, walks what is loaded by the end of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


TESTS = Path(__file__).parent
SAME_EVERYWHERE = (
    *("analysis", "judge", "present", "model/engine", "model/plan", "model/sim", "model/traces"),
    *("differential", "stacks/rbln/rules", "stacks/vllm"),
    *(
        f"extras/{name}"
        for name in ("cases", "formats", "history", "otel", "other_stacks", "paper", "peers", "perfetto")
    ),
    *(f"extras/{name}" for name in ("prometheus", "releases", "search", "sessions")),
    *(f"stacks/rbln/launch/{part}" for part in ("inside", "patches", "releases")),
    *("benchmarks", "docker", "docs", "recipes", "tune"),
)
"""Rooms whose tests are about figures, plans, recordings, the code of a stack, or documents. CONTRIBUTING.md has the
rule: what another Python can change of them, ``test_house`` (imports) and ``tests/cli/test_tree.py`` (every
command by its example) notice."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by what a test asks for and where it lies: ``-m twin`` are the tests that need the real stack."""
    rooms = tuple(f"{TESTS / place}{os.sep}" for place in SAME_EVERYWHERE)
    for item in items:
        if str(item.path).startswith(rooms):
            item.add_marker("same_everywhere")
        if isinstance(item, pytest.Function) and "twin" in item.fixturenames:
            item.add_marker("twin")
