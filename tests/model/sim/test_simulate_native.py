"""vllm-rbln's native path in the simulator: what decides, what a step costs, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import PlanError, SpecError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, find_cost_file, load_cost_model
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import NATIVE
from tests.support.command_line import harness
from tests.support.paged_in_steps import drawn_plan, drawn_server, has_own_prompts
from tests.support.virtual_emulator import assert_same_run

US = 10**9
COSTS = CostModel(
    "known",
    "this test",
    {1: 10 * US, 8: 24 * US},
    chunk_step_fs=5 * US,
    chunk_token_fs=US,
    draft_pass_ns=700,
    query_fs={4: {1: 40 * US, 8: 96 * US}},
)
"""A decode step in a bucket of n takes 8 + 2 n us with one token a request, 32 + 8 n us with four."""


def server(drafts: int = 0, method: str = "ngram", **changed: Any) -> ServerSpec:
    drafting = {
        "num_speculative_tokens": drafts,
        "speculative_method": method,
        "synthetic_acceptance_rates": (1.0,) * drafts,
    }
    shape = {"max_num_seqs": 8, "slot_tokens": 2048, "max_num_batched_tokens": 128}
    return ServerSpec.model_validate({"rules": NATIVE, **shape, **(drafting if drafts else {}), **changed})


def requests(*lengths: tuple[int, int, int]) -> Plan:
    """Sessions of one request each: when it arrives, ns, tokens of its prompt, and of its answer."""
    sessions = tuple(
        SessionPlan(place, at_ns, None, None, (RequestPlan(0, prompt, generate, 0),))
        for place, (at_ns, prompt, generate) in enumerate(lengths)
    )
    return Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), sessions, {})


def steps_of(plan: Plan, spec: ServerSpec) -> list[tuple[str, int, int | None, int]]:
    rows = simulate(plan, spec, COSTS).steps.to_pylist()
    return [(row["kind"], row["n"], row["b"], row["duration_ns"]) for row in rows for _ in range(row["count"])]


def with_queries(folder: Path, *lines: str) -> Path:
    """A cost file that knows steps of several tokens a request."""
    tables = "\n".join(f"[decode.f_ms_by_query.{query}]\n1 = {query}\n12 = {3 * query}.5" for query in range(2, 7))
    path = folder / "native.toml"
    path.write_text("\n".join([find_cost_file("emulated-gpu").read_text(), tables, *lines]))
    return path


def has_an_end(plan: Plan, spec: ServerSpec) -> bool:
    """Whether no prompt gives way to itself for ever."""
    with suppress(PlanError):
        return bool(simulate(plan, spec))
    return False


def test_the_compiled_loop_decides_what_the_stepwise_engine_decides_to_the_nanosecond(tmp_path: Path) -> None:
    costs, seen = str(with_queries(tmp_path)), Counter[str]()
    for seed in range(30):
        chosen = random.Random(f"native {seed}")
        plan, spec = drawn_plan(chosen), drawn_server(chosen)
        drafts, limit = chosen.choice((0, 1, 2, 3, 5)), spec.max_num_seqs
        drawn = server(drafts, chosen.choice(("ngram", "eagle3")))
        rates = tuple(sorted((chosen.random() for _ in range(drafts)), reverse=True))
        changed: dict[str, Any] = {
            "rules": NATIVE,
            "cost_model": costs,
            "async_scheduling": False,
            "max_num_batched_tokens": max(2, spec.max_num_batched_tokens or 0),
            "long_prefill_tokens": spec.long_prefill_tokens and max(2, spec.long_prefill_tokens),
            "decode_buckets": tuple(sorted({limit, *(size for size in spec.decode_buckets if size < limit)})),
            "num_speculative_tokens": drawn.num_speculative_tokens,
            "speculative_method": drawn.speculative_method,
            "synthetic_acceptance_rates": rates or None,
        }
        native = spec.model_copy(update=changed)
        if has_own_prompts(plan) and has_an_end(plan, native):
            seen += assert_same_run(plan, native)
    assert seen["cases"] > 12
    assert min(seen["preemptions"], seen["clients that leave"]) > 4


def test_a_prompt_stops_all_decodes_and_costs_a_whole_part() -> None:
    steps = steps_of(requests((0, 100, 40), (200_000, 300, 2)), server())

    kinds = [kind for kind, *_ in steps]
    assert kinds.count("mixed") == 0
    # 300 tokens are three parts of at most 128, each as long as 128 tokens, one after the other.
    second = kinds.index("prefill", 1)
    assert steps[0] == ("prefill", 1, None, 133_000)
    assert steps[second : second + 3] == [("prefill", 1, None, 133_000)] * 3
    assert steps[second + 3] == ("decode", 2, 2, 12_000)


def test_a_decode_step_costs_by_its_bucket_and_the_tokens_of_each_request() -> None:
    plan = requests((0, 100, 9), (0, 100, 9), (0, 100, 9))
    assert {step[1:] for step in steps_of(plan, server()) if step[0] == "decode"} == {(3, 4, 16_000)}
    drafting = [step for step in steps_of(plan, server(3)) if step[0] == "decode"]
    # Four tokens of each in every step, and one pass of a drafter that looks text up.
    assert drafting == [("decode", 3, 4, 64_700)] * 2
    assert ("decode", 3, 4, 66_100) in steps_of(plan, server(3, "eagle3"))


def test_near_the_longest_request_steps_without_drafts_have_the_length_that_the_method_compiles() -> None:
    plan = requests((0, 230, 26))
    for method, last in (("ngram", 10_000 + 700), ("eagle3", 40_000 + 2_100)):
        assert steps_of(plan, server(3, method, slot_tokens=256))[-1] == ("decode", 1, 1, last), method


def test_a_prompt_that_gives_way_to_itself_for_ever_is_an_error_and_no_endless_run() -> None:
    # Two blocks of 16 tokens are left to a prompt of 32, whose drafts would begin a third.
    plan = requests((0, 208, 40), (0, 32, 8))
    shape = {"slot_tokens": 256, "block_size": 16, "max_num_batched_tokens": 8}
    with pytest.raises(PlanError, match="session 1: its request can never be admitted: the KV memory is too small"):
        simulate(plan, server(3, num_gpu_blocks=17, **shape), COSTS)
    assert simulate(plan, server(3, num_gpu_blocks=18, **shape), COSTS).requests.num_rows == 2


def test_what_other_sessions_wait_for_a_prompt_is_counted_although_no_step_has_both() -> None:
    alone = simulate(requests((0, 100, 200)), server(), COSTS)
    beside = simulate(requests((0, 100, 200), (500_000, 100, 2)), server(), COSTS)
    assert (alone.wait_session_ns, beside.wait_session_ns) == (0, 133_000)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"async_scheduling": True}, "asynchronous scheduling, a second KV memory and kept KV are not modelled"),
        ({"offload_blocks": 9}, "asynchronous scheduling, a second KV memory and kept KV are not modelled"),
        ({"long_prefill_tokens": 1}, "a part of a prompt of one token would run as a decode"),
        ({"decode_buckets": (1, 2, 4)}, "do not end with the limit"),
    ],
)
def test_what_the_native_path_does_not_have_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        EngineConfig.from_server(server(**changed))


def test_drafts_need_a_known_method_and_a_price_of_their_own(tmp_path: Path) -> None:
    plan = requests((0, 100, 9))
    with pytest.raises(SpecError, match="drafts by 'draft_model' on vllm-rbln's native path"):
        EngineConfig.from_server(server(3, "draft_model"))
    with pytest.raises(SpecError, match=r"has no \[decode\.f_ms_by_query\.4\], which these rules need"):
        simulate(plan, server(3), replace(COSTS, query_fs={}))
    errors = '[[errors]]\ncoefficients = ["alpha_ms"]\nstandard_errors = [0.1]\ncorrelations = [[1]]\ndegrees = 3'
    with pytest.raises(SpecError, match=r"states errors of its coefficients, and none of decode\.f_ms_by_query"):
        simulate(plan, server(3), load_cost_model(with_queries(tmp_path, errors)))
    assert simulate(plan, server(), replace(COSTS, query_fs={})).steps.num_rows > 0


EXPERIMENT = """
name = "native"
backend = "sim"
base_seed = 5
replicates = 1

[workload]
num_sessions = 2
shared_prefix_tokens = 0

[server]
rules = "rbln-native-0.12"
cost_model = "native.toml"
slot_tokens = 8192

[[condition]]
name = "plain"

[[condition]]
name = "drafting"
server.num_speculative_tokens = 3
server.speculative_method = "ngram"
server.synthetic_acceptance_rates = [0.9, 0.8, 0.7]
"""


def test_servers_of_the_native_path_are_predicted_and_never_run(tmp_path: Path) -> None:
    with_queries(tmp_path)
    (tmp_path / "native.toml").rename(tmp_path / "costs.toml")
    (tmp_path / "exp.toml").write_text(EXPERIMENT.replace("native.toml", str(tmp_path / "costs.toml")))
    predicted = harness("simulate", "exp.toml", "--draws", "1", cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    assert "rules: rbln-native-0.12" in predicted.stdout
    for backend in ("sim", "emulator"):
        refused = harness("run", "exp.toml", "--backend", backend, cwd=tmp_path)
        assert refused.returncode != 0
        assert "are simulated only, since no record shows their steps" in " ".join(refused.stderr.split())
    sizes = harness("server", "sizes", "exp.toml", cwd=tmp_path)
    assert "vllm-rbln, 4 sizes in requests, 8 decode graphs" in " ".join(sizes.stdout.split())
