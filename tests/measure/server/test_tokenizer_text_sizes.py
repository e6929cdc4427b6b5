"""A server's tokenizer, or the usage of a few requests, sizes the words of text and chat prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.run import replay_here
from harness.measure.client.target import Target, endpoint_of
from harness.measure.records.manifest import Manifest
from harness.measure.records.schema import values_of
from harness.measure.records.store import RunStore
from harness.measure.server.tokenizer import forget_text_sizes, text_sizes_of
from harness.model.experiment import build_plan
from harness.model.spec import ClientSpec
from harness.runner import run_experiment
from tests.measure.server.test_probe import experiment, run
from tests.support.experiments import small_experiment
from tests.support.plain_server import PlainServer, plain_server

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]
BOTH = ("/v1/completions", "/v1/chat/completions")


def of_length(tokens: int, form: str = "text", **keys: Any) -> dict[str, Any]:
    return {"prompt_form": form, "prompt_tokens": {"distribution": "fixed", "value": tokens}, **keys}


def measured(root: Path, plain: PlainServer, workload: dict[str, Any], **keys: Any) -> tuple[Manifest, list[float]]:
    """The manifest of a run on ``plain``, and by what share each prompt was counted otherwise than planned."""
    with plain_server(plain) as there:
        outcome = run(root, there, workload=workload, **keys)
    assert [each.invalid_reasons for each in outcome.runs] == [()]
    (sealed,) = RunStore(root).sealed("asked")
    return sealed.manifest, shares_of(sealed.table("requests"))


def sized(plain: PlainServer, workload: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """The sizes that a replay on ``plain`` is made with, and the shares as above; nothing is recorded."""
    with plain_server(plain) as there:
        spec = experiment(there, workload=workload)
        plan = build_plan(spec.workload, 1, 0)
        endpoint = endpoint_of(spec.server)
        target = Target(endpoint, plain.model, ClientSpec(), ScaledClock(1.0), 60 * NS_PER_S, is_strict=False)
        target = replace(target, text_sizes=text_sizes_of(target, plan, is_ours=False))
        result = replay_here(plan, target, on_event=None, is_stopped=lambda: False)
        forget_text_sizes(endpoint)
    assert set(result.requests["status"].to_pylist()) == {"ok"}
    return result.audit["text_sizes"], shares_of(result.requests)


def shares_of(requests: pa.Table) -> list[float]:
    pairs = values_of(requests, "prompt_tokens", "planned_prompt_tokens")
    return [abs(counted - planned) / planned for counted, planned in pairs]


@pytest.mark.parametrize(("form", "tokenizes"), [("text", True), ("text", False), ("chat", True), ("chat", False)])
def test_long_prompts_of_a_byte_tokenizer_are_counted_as_planned(form: str, tokenizes: bool) -> None:
    server = PlainServer(paths=BOTH, has_metrics=True, tokenizer="bytes", tokenizes=tokenizes)
    sizes, shares = sized(server, of_length(20_000, form))
    assert max(shares) <= 0.01
    assert sizes["source"] == ("tokenize" if tokenizes else "usage")
    assert 0.15 < sizes["words_per_token"] < 0.2


def test_a_run_whose_prompts_are_as_planned_has_no_warning_of_drift(tmp_path: Path) -> None:
    server = PlainServer(has_metrics=True, tokenizer="bytes", max_model_len=32_768)
    manifest, shares = measured(tmp_path, server, of_length(20_000), server={"slot_tokens": 32_768})
    assert max(shares) <= 0.01
    assert manifest.client_audit["text_sizes"]["source"] == "usage"
    assert {finding.severity for finding in manifest.findings if finding.code == "prompt-drift"} <= {"info"}


def test_words_of_one_and_two_tokens_are_exact_where_the_tokenizer_is_asked() -> None:
    sizes, shares = sized(PlainServer(tokenizer="pieces", tokenizes=True), of_length(200))
    assert set(sizes["word_tokens"]) == {1.0, 2.0}
    assert max(shares) == 0.0


@pytest.mark.parametrize("form", ["text", "chat"])
def test_usage_alone_tells_sizes_that_follow_from_the_letters_of_a_word(form: str) -> None:
    sizes, shares = sized(PlainServer(paths=BOTH, tokenizer="pieces"), of_length(2000, form))
    assert max(shares) <= 0.01
    assert sizes["source"] == "usage"
    assert set(sizes["word_tokens"]) == {1.0, 2.0}


def test_a_mean_that_words_of_one_and_two_tokens_miss_is_called_one(tmp_path: Path) -> None:
    manifest, shares = measured(tmp_path, PlainServer(has_metrics=True, tokenizer="mixed"), of_length(300))
    # With a token for each word it would be some 50 %.
    assert 0.01 < max(shares) < 0.1
    (drift,) = [finding for finding in manifest.findings if finding.code == "prompt-drift"]
    assert drift.severity == "warning"
    assert "That is a mean by the letters of a word: which words are longer is not known" in drift.evidence


def test_short_prompts_of_a_byte_tokenizer_are_exact() -> None:
    _, shares = sized(PlainServer(tokenizer="bytes", tokenizes=True), of_length(200, shared_prefix_tokens=64))
    assert shares[0] == 0.0


@pytest.mark.parametrize("form", ["text", "chat"])
def test_where_a_word_is_a_token_only_the_template_changes_the_words(form: str) -> None:
    sizes, shares = sized(PlainServer(paths=BOTH), of_length(300, form))
    assert max(shares) == 0.0
    assert (sizes["words_per_token"], set(sizes["word_tokens"])) == (1.0, {1.0})
    assert (sizes["first_tokens"], sizes["turn_tokens"]) == ((3, 6) if form == "chat" else (0, 0))


def test_a_server_is_asked_once_before_the_first_run_of_an_experiment(tmp_path: Path) -> None:
    server = PlainServer(has_metrics=True, tokenizer="bytes", tokenizes=True)
    with plain_server(server) as there:
        assert len(run(tmp_path / "first", there, workload=of_length(200), replicates=2).runs) == 2
        assert server.num_tokenized == 1
        server.tokenizer = "words"
        second = run(tmp_path / "second", there, workload=of_length(200))
    assert server.num_tokenized == 2
    assert second.runs[0].manifest.client_audit["text_sizes"]["words_per_token"] == 1.0


def test_token_ids_need_no_sizes(tmp_path: Path) -> None:
    server = PlainServer(has_metrics=True, gives_token_ids=True, tokenizes=True)
    manifest, _ = measured(tmp_path, server, of_length(200, "token-ids"))
    assert "text_sizes" not in manifest.client_audit
    assert server.num_tokenized == 0


@pytest.mark.parametrize(("key", "as_objects"), [("content", False), ("inputs", True)])
def test_other_servers_tokenizers_are_asked_in_their_own_words(key: str, as_objects: bool) -> None:
    server = PlainServer(tokenizer="bytes", tokenizes=True, text_key=key, ids_as_objects=as_objects)
    sizes, shares = sized(server, of_length(2000))
    assert sizes["source"] == "tokenize"
    assert max(shares) <= 0.01


def test_what_sizes_cannot_reach_is_in_the_finding(tmp_path: Path) -> None:
    server = PlainServer(paths=BOTH, has_metrics=True, tokenizer="bytes", tokenizes=True)
    manifest, shares = measured(tmp_path, server, of_length(40, "chat"))
    assert max(shares) > 0.01
    (drift,) = [finding for finding in manifest.findings if finding.code == "prompt-drift"]
    assert drift.severity == "warning"
    assert "2 of them differ by more than 1 %" in drift.evidence
    assert "sized by the server's tokenizer (0.164 words a token)" in drift.evidence
    assert "The shortest word is 4 tokens" in drift.evidence
    assert "adds 6 tokens to each turn" in drift.evidence
    assert "chat template" in drift.hint


def test_a_server_that_refuses_the_longer_request_gets_a_word_a_token_and_the_finding(tmp_path: Path) -> None:
    def refuse_the_third(server: PlainServer) -> None:
        # After the check before the first run and the shorter request.
        server.fails = "too long" if len(server.asked) == 3 else ""

    server = PlainServer(has_metrics=True, tokenizer="bytes", on_answer=refuse_the_third)
    manifest, shares = measured(tmp_path, server, of_length(400))
    assert manifest.client_audit["text_sizes"]["source"] == "assumed"
    assert max(shares) > 1
    (drift,) = [finding for finding in manifest.findings if finding.code == "prompt-drift"]
    assert "because the server did not tell their sizes" in drift.evidence


@pytest.mark.parametrize(
    "answer",
    [
        *('{"tokens": "many"}', '{"tokens": [1, null]}', '{"tokens": []}', "[]", "7", "{"),
        *('{"tokens": [10, 10, 10]}', '[{"id": "a"}]'),
    ],
)
def test_an_answer_that_is_no_list_of_tokens_leaves_the_sizes_to_usage(answer: str) -> None:
    sizes, shares = sized(PlainServer(tokenizer="bytes", tokenizes=True, tokenized=answer), of_length(2000))
    assert sizes["source"] == "usage"
    assert max(shares) <= 0.01


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_server_that_the_harness_starts_is_asked_for_its_tokenizer_alone(tmp_path: Path, form: str) -> None:
    workload = {**small_experiment().workload.model_dump(), "prompt_form": form}
    outcome = run_experiment(small_experiment(workload=workload, condition=[{"name": "base"}]), runs_root=tmp_path)
    (sealed,) = RunStore(tmp_path).sealed("small")
    assert outcome.runs[0].invalid_reasons == ()
    assert sealed.manifest.client_audit["text_sizes"]["source"] == "tokenize"
    rows = sealed.table("requests").to_pylist()
    assert [row["prompt_tokens"] - row["planned_prompt_tokens"] for row in rows if row["request"] == 0] == [0, 0, 0]
