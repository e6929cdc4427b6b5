"""Step and session times of artifacts: medians per session by factors, beside the cost model."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.extras.paper.catalogue import repeats
from harness.model.spec import parse_experiment
from harness.runner import run_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> ExperimentRuns:
    def condition(artifact: str, bucket: int) -> dict[str, Any]:
        return {
            "name": f"{artifact}.{bucket}",
            "factors": {"artifact": artifact, "bucket": bucket},
            "workload": {"num_sessions": bucket},
        }

    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 9,
        "replicates": 2,
        "same_input": True,
        "workload": {
            "num_sessions": 1,
            "requests_per_session": 1,
            "waits": "none",
            "prompt_tokens": {"distribution": "fixed", "value": 256},
            "generate_tokens": {"distribution": "fixed", "value": 40},
        },
        "condition": [condition(artifact, bucket) for artifact in ("first", "again") for bucket in (1, 2)]
        + [
            {
                "name": "alone",
                "workload": {
                    "num_sessions": 3,
                    "concurrency": 1,
                    "generate_tokens": {"distribution": "fixed", "value": 1},
                },
            }
        ],
    }
    runs_root = tmp_path_factory.mktemp("runs")
    return ExperimentRuns(run_experiment(parse_experiment(table, where="test"), runs_root=runs_root).runs)


def test_sessions_are_grouped_by_factors_whatever_conditions_are_called(experiment: ExperimentRuns) -> None:
    rows = repeats.session_table(experiment).records()
    assert [(row["bucket"], row["artifact"]) for row in rows] == [
        (b, name) for b in (1, 2) for name in ("again", "first")
    ]
    assert {row["source"] for row in rows} == {"steps"}
    assert {row["null_pairs"] for row in rows} == {2}


def test_a_deterministic_device_has_the_same_time_in_every_session(experiment: ExperimentRuns) -> None:
    for row in repeats.session_table(experiment).records():
        first, second = str(row["ms_per_session"]).split(" / ")
        assert first == second
        assert row["null_max_ms"] == pytest.approx(0, abs=1e-3)


def test_undisturbed_steps_take_what_the_cost_model_says(experiment: ExperimentRuns) -> None:
    table = repeats.step_table(experiment)
    assert {(1, 1), (2, 2)} <= {(row["n"], row["b"]) for row in table.records()}
    assert (repeats.largest_model_error_ms(table, "median_ms") or 0) < 0.001


def test_one_token_requests_that_run_alone_are_prefills(experiment: ExperimentRuns) -> None:
    table = repeats.prefill_table(experiment)
    assert table.column("computed_tokens") == [256] * 6
    assert repeats.largest_model_error_ms(table, "elapsed_ms") == pytest.approx(0, abs=1e-6)
