"""What a tune of a server of others prints is enough to go on: the printed command starts the candidate."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from harness.tune import confirm
from tests.support.command_line import harness
from tests.support.emulator_process import end, start_ready
from tests.support.experiments import UNHURRIED_WORDS

pytestmark = pytest.mark.live
SMALL = (
    *("workload.num_sessions=4", "workload.requests_per_session=2", "workload.wait_cap_s=1"),
    *(f"workload.{key}.distribution=fixed" for key in ("prompt_tokens", "generate_tokens")),
    *("workload.prompt_tokens.value=200", "workload.generate_tokens.value=12"),
)


def test_the_printed_command_starts_the_candidate_and_the_same_tune_then_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(confirm, "MOST_BLOCKS", 4)
    beside = ("--enable-prompt-tokens-details",)
    today = start_ready(tmp_path / "today", "--max-num-seqs", "1", "--decode-buckets", "1", *beside)
    try:
        words = [word for setting in SMALL for word in ("--set", setting)]
        command = ["tune", "--for", today.address, "--budget", "2min", *words, *UNHURRIED_WORDS]
        first = harness(*command)
        assert first.returncode == 0, first.stdout + first.stderr
        (name,) = re.findall(r"--candidate (\w+)=URL", first.stdout)
        printed = re.search(rf"^  {name}: harness server emulator (.*)$", first.stdout, re.MULTILINE)
        assert printed is not None, first.stdout
        same = re.search(r"`harness (tune tune-[^`]*)` is the same", " ".join(first.stdout.split()))
        assert same is not None, first.stdout
        candidate = start_ready(tmp_path / name, *shlex.split(printed[1]), *beside)
        try:
            # Of the same experiment with the same settings, or it would be refused as another tune.
            last = harness(*shlex.split(same[1]), "--candidate", f"{name}={candidate.address}")
        finally:
            end(candidate)
    finally:
        end(today)
    # A busy machine may hide the gain; nothing else may.
    verdicts = {0: r"% less time in flight \([^)]*\), confirmed \(emulated\)", 5: "not told apart"}
    assert last.returncode in verdicts, last.stdout + last.stderr
    assert re.search(verdicts[last.returncode], " ".join(last.stdout.split())), last.stdout
