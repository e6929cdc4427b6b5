"""Costs by the timed steps that an emulated vLLM wrote beside its recorded sessions: those by which it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.calibration.cost_file import fit_recorded, write_cost_file
from harness.errors import SpecError
from harness.extras.sessions.verdict import timed_steps_of
from harness.model.engine import load_cost_model
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec
from tests.support.recorded_sessions import Files, recorded_with_steps

MS = 1_000_000
RAN = load_cost_model("emulated-gpu")


def recorded(folder: Path, num_sessions: int) -> Files:
    """Sessions of nine turns that come one after another, at a server that runs four requests at once."""
    table = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "slot_tokens": 4096, "max_num_seqs": 4}
    server = ServerSpec.model_validate({**table, "decode_buckets": (1, 2, 4), "num_gpu_blocks": 1024})
    sessions: list[SessionPlan] = []
    for index in range(num_sessions):
        requests: list[RequestPlan] = []
        for _ in range(9):
            kept = requests[-1].stream_tokens if requests else 0
            requests.append(RequestPlan(kept, 60 + 120 * (index % 3), 30 + 10 * index, 20 * MS))
        sessions.append(SessionPlan(index, 150 * MS * index, None, None, tuple(requests)))
    plan = Plan("timed", 1, 7, "as-drawn", 0, (300, 2000), tuple(sessions))
    files = Files(folder / "s.jsonl", folder / "s.core_steps.jsonl")
    recorded_with_steps(plan, server, *files)
    return files


def test_recorded_steps_tell_the_costs_by_which_the_server_ran(tmp_path: Path) -> None:
    files = recorded(tmp_path, 6)
    steps = timed_steps_of(files.sessions)
    assert steps == files.steps
    fitted = fit_recorded(steps, seed=1)
    model = load_cost_model(write_cost_file(fitted, tmp_path, "mine"))
    assert "of up to 4 requests at once" in model.source
    assert model.measured_sizes == (1, 2, 4)
    for n, b in ((1, 1), (2, 2), (3, 4), (4, 4)):
        ran_ns = RAN.decode_step_ns(b, n, 300 * n)
        assert model.decode_step_ns(b, n, 300 * n) == pytest.approx(ran_ns, rel=0.02)
    assert model.chunked_step_ns(2, 2, 600, 256) == pytest.approx(RAN.chunked_step_ns(2, 2, 600, 256), rel=0.1)


def test_steps_of_one_number_of_requests_price_no_other(tmp_path: Path) -> None:
    files = recorded(tmp_path, 1)
    with pytest.raises(SpecError, match=r"only those of \[1\] requests were often enough to be timed"):
        fit_recorded(files.steps, seed=1)
