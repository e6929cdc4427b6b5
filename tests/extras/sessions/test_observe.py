"""The recorder is put into an environment that the harness does not own, found there by Python, and removed whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ServerError
from harness.extras.sessions.observe import install, kubernetes_lines, place_of, records_in, remove
from tests.support.command_line import harness


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with something named vllm."""
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").touch()
    return tmp_path / "env"


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_it_is_found_by_its_entry_points_and_removed_whole(environment: Path) -> None:
    before = content(environment)
    place = place_of(environment)
    install(place)
    install(place)
    script = (
        "from importlib.metadata import entry_points\n"
        "print([point.load().__module__ for point in entry_points(group='vllm.general_plugins')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['vllm_step_log.core']\n"
    assert len(remove(place)) == 2
    assert content(environment) == before
    assert remove(place) == []


def test_what_somebody_else_put_there_is_neither_overwritten_nor_removed(environment: Path) -> None:
    place = place_of(environment)
    install(place)
    (records_in(place)[0] / "INSTALLER").write_text("pip\n")
    for act in (install, remove):
        with pytest.raises(ServerError, match="not put there by this command"):
            act(place)
    assert (place / "vllm_step_log" / "core.py").exists()


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="has no vLLM"):
        place_of(tmp_path)


def test_the_command_says_what_it_wrote_and_how_servers_are_started(environment: Path) -> None:
    done = harness("server", "observe", str(environment))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written:") == 2
    for words in (
        "VLLM_SESSIONS_FILE=",
        "VLLM_CORE_STEPS_FILE=",
        "docker run",
        "kubectl create configmap",
        "tune --from",
    ):
        assert words in done.stdout
    done = harness("server", "observe", str(environment), "--remove")
    assert done.stdout.count("removed:") == 2


def test_a_pod_gets_every_file_of_the_recorder() -> None:
    text = "\n".join(kubernetes_lines())
    for name in ("__init__.py", "core.py", "sessions.py", "logger.py", "entry_points.txt", "METADATA"):
        assert f"key: {name}, path: vllm_step_log" in text
