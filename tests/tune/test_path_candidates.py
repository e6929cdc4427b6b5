"""Candidates whose servers somebody else started are what was asked for, or nothing is measured on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import RunInvalidError, SpecError
from harness.measure.records.store import RunStore
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner import ExperimentOutcome, run_experiment
from harness.tune.answer import Answer, commands, with_declared
from harness.tune.confirm import base_of
from harness.tune.explore import QUICK
from harness.tune.path import Tune
from tests.support.experiments import UNHURRIED
from tests.support.plain_server import PlainServer, plain_server

NOBODY, ANOTHER = "http://127.0.0.1:9", "http://127.0.0.1:10"


def of_others(url: str = NOBODY, **server: Any) -> ExperimentSpec:
    """A server of others with two KV slots too few."""
    table = {
        "name": "others",
        "backend": "attached",
        "base_seed": 7,
        "server": {"url": url, "declared": True, **server},
        "workload": {"num_sessions": 4, "wait_cap_s": 20.0},
        "tune": {"may_change": ["max_num_seqs"]},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table, where="test")


def simulated(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
    """As if somebody's server were the simulated one."""
    assert until_ns > 0
    server = spec.server.model_copy(update={"url": "", "step_log": "", "declared": False, "decode_buckets": (1, 2, 4)})
    spec = spec.model_copy(update={"backend": "sim", "server": server})
    return run_experiment(spec, runs_root=folder, resume=True, **options)


PAGED: dict[str, Any] = {
    "rules": "vllm-paged",
    "cost_model": "emulated-gpu",
    "max_num_seqs": 1,
    "step_log": "today.jsonl",
}


@pytest.mark.parametrize(
    ("place", "named"),
    [(ANOTHER, "best needs a step log of its own"), (f"{ANOTHER},best.jsonl", "cannot be read")],
)
def test_a_candidate_has_a_step_log_of_its_own_where_todays_server_has_one(
    tmp_path: Path, place: str, named: str
) -> None:
    said: list[str] = []
    effort = QUICK.divided(6)
    made = Tune(of_others(**PAGED), tmp_path, simulated, said.append, effort=effort, candidates={"best": place})
    with pytest.raises(Exception, match=named) as refused:
        made.run()
    assert not list(tmp_path.rglob("frozen.json"))
    if place == ANOTHER:
        assert "--candidate best=URL,FILE, started with VLLM_CORE_STEPS_FILE=FILE" in str(refused.value)


@pytest.mark.parametrize(
    ("candidates", "named"),
    [
        (
            {"best": "http://localhost:9/v1/,best.jsonl"},
            f"best at http://localhost:9/v1/ is today's server at {NOBODY}",
        ),
        ({"smallest": ANOTHER, "best": f"{ANOTHER}/"}, f"best at {ANOTHER}/ is smallest at {ANOTHER}"),
    ],
)
def test_two_configurations_at_one_address_are_refused_before_anything_is_measured(
    tmp_path: Path, candidates: dict[str, str], named: str
) -> None:
    made = Tune(of_others(**PAGED), tmp_path, simulated, lambda _: None, candidates=candidates)
    with pytest.raises(SpecError, match=named):
        made.run()
    assert not list(tmp_path.iterdir())


def test_rules_that_nothing_shows_are_asked_for_before_the_first_run(tmp_path: Path) -> None:
    def never(*_: Any, **__: Any) -> ExperimentOutcome:
        raise AssertionError("a run was made")

    with plain_server(PlainServer(has_metrics=True)) as server:
        made = Tune(of_others(server.url), tmp_path, never, lambda _: None)
        with pytest.raises(SpecError, match="nothing shows the scheduling rules of this server") as refused:
            made.run()
        assert "--stack vllm" in str(refused.value)
        assert server.asked == []


def test_a_server_that_has_other_settings_ends_the_tune_at_its_first_run_which_is_made_again(tmp_path: Path) -> None:
    def performed(spec: ExperimentSpec, folder: Path, _until_ns: int, **options: Any) -> ExperimentOutcome:
        return run_experiment(spec, runs_root=folder, resume=True, **options)

    sample = 'vllm:num_requests_running{engine="0",model_name="plain"}'
    with plain_server(PlainServer(has_metrics=True, gives_token_ids=True, metrics=f"{sample} 6.0\n")) as server:
        spec = of_others(server.url, rules="vllm-paged", cost_model="emulated-gpu", max_num_seqs=3)
        workload, limits = (
            spec.workload.model_copy(update={"wait_cap_s": 0.1}),
            spec.limits.model_copy(update=UNHURRIED),
        )
        spec = spec.model_copy(update={"workload": workload, "limits": limits})
        made = Tune(spec, tmp_path, performed, lambda _: None, effort=QUICK.divided(6))
        with pytest.raises(RunInvalidError) as refused:
            made.run()
        assert "max_num_seqs: declared 3, and 6 requests ran at once in one engine. Change [server]" in str(
            refused.value
        )
        store = RunStore(tmp_path / "others-tune")
        assert [run.is_valid for run in store.sealed()] == [False]
        server.metrics = f"{sample} 2.0\n"
        assert made.run().diagnosis is not None
        assert [run.is_valid for run in store.sealed("others-diagnose")] == [True, True, True]


def test_an_attached_server_with_rules_of_vllm_is_answered_in_its_words() -> None:
    spec = of_others(rules="vllm-paged", max_num_seqs=4)
    assert spec.server.decode_buckets == ()
    base = base_of(spec, None)
    (line,) = commands(spec, base.setup, base)
    assert line.startswith("vllm serve MODEL --max-num-seqs 4 ")
    assert (base.compile_s(base.setup), base.memory_gib(base.setup)) == (None, None)


def test_what_nothing_shows_stands_in_the_first_line() -> None:
    found = with_declared(Answer("confirmed", "8 requests: 14 % less.", None), "Declared, not verified: best (x = 8).")
    assert found.sentence == "8 requests: 14 % less; declared, not verified."
    assert found.rests.endswith("best (x = 8).")
