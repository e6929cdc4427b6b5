"""A mistake on the command line or in [tune] is named with its option or key, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli.tune import tune
from harness.errors import HarnessError
from tests.support.processes import VirtualClock

FILE = """\
name = "small"
backend = "sim"
[workload]
num_sessions = 3
wait_cap_s = 5.0
[[condition]]
name = "base"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(FILE, encoding="utf-8")
    (tmp_path / "tune-sim.toml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


OFFSETS = "workload.start_offset_s=1.0"
VLLM = ["backend=vllm", "server.model=any"]
NOWHERE = "http://127.0.0.1:9"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"experiment": None}, "harness tune: nothing to tune is named"),
    ({"experiment": Path("other.toml")}, "other.toml"),
    ({"experiment": None, "url": "localhost:8000"}, "url"),
    ({"experiment": None, "url": NOWHERE, "wait": "0s"}, f"{NOWHERE}: "),
    ({"experiment": None, "url": NOWHERE, "wait": "long"}, "--wait: 'long' is no time"),
    ({"experiment": None, "url": NOWHERE, "backend": "sim"}, "--for: goes with backend attached, not with sim"),
    ({"experiment": None, "recording": "none.jsonl"}, "none.jsonl: there is no such trace file"),
    ({"experiment": None, "backend": "sim"}, "tune-sim.toml: is there already"),
    ({"experiment": None, "backend": "npu"}, "backend: unknown backend 'npu'"),
    ({"backend": "npu"}, "backend: unknown backend 'npu'"),
    ({"api_key_env": "KEY"}, "--api-key-env: goes with --for"),
    ({"agents": 4}, "--agents: goes with --from"),
    ({"candidate": ["best"]}, "--candidate: 'best' is no NAME=URL"),
    ({"candidate": ["other=http://a:1"]}, "--candidate: 'other=http://a:1' is no NAME=URL"),
    ({"candidate": ["best="]}, "--candidate: 'best=' is no NAME=URL"),
    ({"candidate": ["best=a:1"]}, "--candidate: 'best=a:1' is no NAME=URL"),
    ({"candidate": ["best=http://a:1", "best=http://a:2"]}, "--candidate: 'best' is given twice"),
    ({"candidate": ["best=http://a:1"]}, "--candidate: backend sim starts the servers of its candidates itself"),
    ({"budget": "soon"}, "tune.budget: is 'soon', and a time is wanted"),
    ({"budget": "0s"}, "tune.budget: is '0s', and a time is wanted"),
    ({"memory": "14"}, "tune.memory: is '14', and a size is wanted"),
    ({"memory": "14GB"}, "tune.memory: is '14GB', and a size is wanted"),
    ({"memory": "4GiB", "changes": VLLM}, "tune.memory: is reckoned for a compiled model on an NPU"),
    ({"may_change": ["slot_tokens"]}, "tune.may_change: 'slot_tokens' is no key that can be searched"),
    ({"may_change": ["num_gpu_blocks"]}, "tune.may_change: 'num_gpu_blocks' is no key that can be searched"),
    ({"changes": ["tune.goal=speed"]}, "tune.goal"),
    ({"changes": ["tune.goal=sessions"]}, "tune.goal: no target is set that could hold"),
    ({"changes": ["tune.percentile=100"]}, "tune.percentile"),
    ({"changes": ["tune.agents=[0]"]}, "tune.agents: must be positive"),
    ({"changes": ["tune.agents=[6]", OFFSETS]}, "tune.agents: this workload has no number of agents"),
    ({"changes": ["tune.most_sizes=-1"]}, "tune.most_sizes"),
    ({"changes": ["tune.may_chnage=[]"]}, "tune.may_chnage: unknown key"),
    ({"backend": "emulator", "budget": "60s"}, "tune.budget: it leaves room for 0 plans"),
]


@pytest.mark.parametrize(("given", "named"), MISTAKES, ids=[named for _, named in MISTAKES])
def test_a_mistake_is_named_with_its_option_or_key(folder: Path, given: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"experiment": Path("small.toml"), **given}
    # Only the search itself knows these.
    starts = "agents: this" in named
    with pytest.raises(HarnessError) as raised:
        tune(**options, only="explore" if starts else None)
    assert named in str(raised.value)
    assert raised.value.hint or "unknown key" in named or "tune." in named
    assert not list(folder.glob("runs/**/manifest.json"))
    assert len(list(folder.glob("*.toml"))) == 2


@pytest.mark.parametrize("is_written", [False, True])
def test_a_server_that_is_starting_is_waited_for_before_and_after_its_file_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_written: bool
) -> None:
    monkeypatch.setattr("harness.cli.doctor.MonotonicClock", VirtualClock)
    if is_written:
        asked = f'# harness tune: ["", "{NOWHERE}", "", ""]\n'
        text = FILE.replace('"sim"', '"attached"') + f'[server]\nurl = "{NOWHERE}"\n'
        (folder / "tune-127-0-0-1-9.toml").write_text(asked + text, encoding="utf-8")
    with pytest.raises(HarnessError):
        tune(url=NOWHERE, wait="90s")
    assert f"{NOWHERE} is not ready" in capsys.readouterr().err.replace("\n", " ")
