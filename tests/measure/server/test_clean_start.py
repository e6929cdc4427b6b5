"""Runs on one server that is never restarted begin clean: none reuses what another left in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.measure.records.store import RunStore
from harness.model.plan.tokens import PromptIds, TokenStreams
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from tests.support.emulator_process import Emulator, end, start_ready
from tests.support.experiments import one_condition
from tests.support.plain_server import PlainServer, plain_server

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]
PAGED = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 4096, "max_num_seqs": 8}
LENGTHS: dict[str, Any] = {
    "num_sessions": 3,
    "requests_per_session": 2,
    "waits": "none",
    "prompt_tokens": {"distribution": "uniform", "low": 400, "high": 800},
    "generate_tokens": {"distribution": "uniform", "low": 8, "high": 24},
}


def null_experiment(url: str, replicates: int, **workload: Any) -> ExperimentSpec:
    """Two conditions that are equal in all but a name, which each request carries."""
    conditions = [{"name": "one"}, {"name": "other"}]
    return one_condition(
        "null",
        "attached",
        replicates=replicates,
        workload={**LENGTHS, **workload},
        server={"url": url},
        condition=conditions,
    )


def cached_tokens_of(run: SealedRun, *, returns: bool) -> list[int]:
    columns = values_of(run.table("requests"), "request", "cached_tokens")
    return [cached for request, cached in columns if (request > 0) == returns]


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    started = start_ready(tmp_path_factory.mktemp("paged"), time_scale=1.0, server=PAGED)
    yield started
    end(started)


@pytest.fixture(scope="module")
def pair(paged: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Sequence[SealedRun]:
    """Two runs of one plan whose sessions share a prefix, made once for all tests that only read them."""
    root = tmp_path_factory.mktemp("pair")
    run_experiment(null_experiment(paged.address, 1, shared_prefix_tokens=256), runs_root=root).require_valid()
    return RunStore(root).sealed("null")


def test_two_equal_conditions_on_one_server_compute_the_same_in_each_pair(paged: Emulator, tmp_path: Path) -> None:
    run_experiment(null_experiment(paged.address, 2), runs_root=tmp_path).require_valid()
    runs = list(RunStore(tmp_path).sealed("null"))
    assert len(runs) == 4
    assert {cached for run in runs for cached in cached_tokens_of(run, returns=False)} == {0}
    assert min(cached for run in runs for cached in cached_tokens_of(run, returns=True)) > 0, "returns are reused"
    table = harness.compare("null", runs_root=tmp_path)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    (computed,) = [row for row in rows if row["measure"] == "computed_tokens_per_request"]
    assert computed["ratio"] == 1.0


def test_what_sessions_share_is_shared_within_a_run_and_not_between_runs(pair: Sequence[SealedRun]) -> None:
    for run in pair:
        assert sorted(cached_tokens_of(run, returns=False)) == [0, 256, 256]


def test_the_manifest_has_what_makes_the_same_prompts_again_and_a_server_without_the_key_gets_no_salt(
    tmp_path: Path,
) -> None:
    with plain_server(PlainServer(has_metrics=True, gives_token_ids=True)) as server:
        run_experiment(null_experiment(server.url, 1), runs_root=tmp_path).require_valid()
    one, other = RunStore(tmp_path).sealed("null")
    assert one.plan == other.plan
    sent = [body["prompt"] for body in server.asked[1:]]
    assert not any("cache_salt" in body for body in server.asked)
    ids = [PromptIds(**run.manifest.client_audit["prompt_ids"]) for run in (one, other)]
    assert ids[0].seed != ids[1].seed
    for of_run in ids:
        prompt = TokenStreams(one.plan, ids=of_run).fresh_tokens(0, 0).tolist()
        assert prompt in sent
    assert TokenStreams(one.plan).fresh_tokens(0, 0).tolist() not in sent


def test_each_run_has_a_salt_of_its_own_where_the_server_knows_the_key(pair: Sequence[SealedRun]) -> None:
    salts = [run.manifest.client_audit["cache_salt"] for run in pair]
    assert len(set(salts)) == 2
    assert all(salts)


def test_the_cache_is_emptied_where_the_server_offers_it(tmp_path: Path) -> None:
    emulator = start_ready(tmp_path / "server", "--dev-mode", time_scale=1.0, server=PAGED)
    try:
        prompt = list(range(1000, 1400))
        emulator.complete(prompt, max_tokens=2)
        assert emulator.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
        run_experiment(null_experiment(emulator.address, 1), runs_root=tmp_path).require_valid()
        assert emulator.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        end(emulator)
    assert all(run.manifest.client_audit["cache_reset"] for run in RunStore(tmp_path).sealed("null"))


def test_a_first_request_that_reuses_what_its_run_did_not_send_makes_the_run_invalid(tmp_path: Path) -> None:
    with plain_server(PlainServer(has_metrics=True, gives_token_ids=True, cached_tokens=32)) as server:
        outcome = run_experiment(null_experiment(server.url, 1), runs_root=tmp_path)
    reasons = [reason for run in outcome.runs for reason in run.invalid_reasons if "cache-not-clean" in reason]
    assert len(reasons) == 2
    assert "3 of 3 first requests found tokens that nothing of this run had sent: 96 of" in reasons[0]


def test_conditions_of_one_server_in_an_order_that_favours_one_are_a_warning(pair: Sequence[SealedRun]) -> None:
    (run, _) = pair
    (found,) = [finding for finding in run.manifest.findings if finding.code == "order-unbalanced"]
    assert found.severity == "warning"
    assert found.evidence.startswith("one ran earlier than other on average, in 1 replicates")
