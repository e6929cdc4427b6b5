"""``harness sweep``: a condition per value, one curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.measure.records.store import RunStore
from harness.model.spec.changes import swept_table
from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere

EXPERIMENT = """
name = "few"
base_seed = 4
replicates = 1
backend = "sim"
[workload]
num_sessions = 2
wait_cap_s = 1.0
generate_tokens = {distribution = "uniform", low = 8, high = 16}
[window]
measure_s = 9
[[condition]]
name = "only"
"""


def test_a_key_is_swept_and_the_report_draws_a_curve(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text(EXPERIMENT)
    words = ("few.toml", "--over", "workload.num_sessions=2,4,6", "--runs", "runs")
    result = harness("sweep", *words, cwd=tmp_path, draws=True)
    assert result.returncode == 0, result.stderr
    runs = RunStore(tmp_path / "runs").sealed()
    assert [run.condition for run in runs] == ["num-sessions-2", "num-sessions-4", "num-sessions-6"]
    assert [run.manifest.factors for run in runs] == [{"num_sessions": n} for n in (2, 4, 6)]
    page = (tmp_path / "runs" / "few-sweep-num-sessions.html").read_text(encoding="utf-8")
    assert "Rates and time to first token by num_sessions" in page
    assert "Percentiles over the requests of the valid runs due from 0 to 9 s after the start" in page
    assert "of the requests due from 0 to 9 s after the start" in " ".join(result.stdout.split())
    assert "no client ran, and in virtual time nothing is late" in page
    assert "wall ms" not in page


@pytest.mark.parametrize(
    "over", ["kv_slots=1,2", "server.kv_slots=8", "server.kv_slots=8,8", "limits.stall_ms=1,2", ""]
)
def test_what_is_no_sweep_is_refused(over: str) -> None:
    with pytest.raises(SpecError, match="--over"):
        swept_table({"name": "x", "condition": [{"name": "a"}]}, over)
