"""The page "from question to decision" is followed to the letter, each command as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ExitCode
from harness.measure.client.target import Endpoint
from harness.measure.server.ask import ask
from harness.model.spec import load_experiment
from tests.support.command_line import harness
from tests.support.processes import comes_true

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "question-to-decision.md"


SENTENCE = (
    r"twelve-slots costs \d+\.\d % less than base \(95 % interval, given these costs: \d+\.\d to \d+\.\d % less\): "
)


@pytest.mark.same_everywhere
@pytest.mark.live
@pytest.mark.timeout(1_200)
def test_a_newcomer_follows_the_page_to_a_decision(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    commands = re.findall(r"^\$ (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    printed: dict[str, str] = {}
    for command in commands:
        words = shlex.split(command)
        if words[-1] == "&":
            started = subprocess.Popen([sys.executable, "-m", *words[:-1]], stderr=subprocess.DEVNULL)
            request.addfinalizer(started.wait)
            request.addfinalizer(started.kill)
            port = int(words[words.index("--port") + 1])
            assert comes_true(
                lambda port=port: ask(Endpoint("127.0.0.1", port), "/health", deadline_s=10.0).status == 200, 60.0
            )
            continue
        done = _called(words, tmp_path)
        if "--confirmatory" in words:
            # Other tests on this machine make some runs late: they are repeated, as the page says.
            for _ in range(3):
                if done.returncode == ExitCode.RUN_INVALID:
                    done = _called([*words, "--resume", "--retry-invalid"], tmp_path)
            done.returncode = 0 if done.returncode == ExitCode.RUN_INVALID else done.returncode
        printed[command] = " ".join(done.stdout.split())
        # As planned, one measurement in ten does not show the gain.
        is_failed = "decisions are FAIL" in done.stderr
        assert done.returncode == (ExitCode.RULE_FAILED if is_failed else 0), f"{command}\n{done.stderr}"
    assert (tmp_path / "slots.html").is_file()
    assert (tmp_path / "plans" / "frozen" / "slots.json").is_file()
    needed = re.search(r"twelve-slots: (\d+) replicates show it cheaper", printed["harness power slots.toml"])
    assert needed is not None
    assert load_experiment(tmp_path / "slots.toml").replicates >= int(needed[1])
    predicted = printed["harness decide slots --runs runs/predicted"]
    assert re.search(SENTENCE + r"NOT SUBJECT \(would be PASS\)", predicted), predicted
    measured = printed["harness decide slots --runs runs/measured"]
    of_run = next(text for command, text in printed.items() if "--confirmatory" in command)
    if "Cannot tell: " in of_run or "Withheld: " in of_run:
        # Other tests kept the emulator waiting, so that its two channels lie apart.
        assert "WITHHELD" in measured, measured
    elif re.search(SENTENCE + "cheaper", of_run):
        assert re.search(SENTENCE + "PASS", measured), measured
    else:
        assert re.search("twelve-slots costs .*: (PASS|FAIL)", measured), measured
    compared = printed["harness compare runs/measured/slots --baseline runs/predicted/slots"]
    assert compared.count("paired by plan") == 2, compared


def _called(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    if command[0] == "harness":
        return harness(*command[1:], cwd=folder)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
