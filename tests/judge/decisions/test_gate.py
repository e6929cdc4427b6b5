"""The gate: paired by plan, worse only when shown, passed only when shown, and what lies between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.compare.measures import Bounds, Value
from harness.errors import SpecError
from harness.judge.decisions.gate import FIGURES, GateRun, GateVerdict, gate_policy, gate_run, judge
from harness.judge.planning.power import PlannedTest
from harness.measure.records.manifest import Manifest
from harness.measure.records.run import SealedRun
from harness.present.report.gate import gate_lines, shown_tables
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

PASS, WORSE, CANNOT_TELL = GateVerdict.PASS, GateVerdict.WORSE, GateVerdict.CANNOT_TELL


def a_run(replicate: int, values: Mapping[str, float], num_requests: int = 1000, **manifest: object) -> GateRun:
    facts = {"experiment": "made", "condition": "base", "plan_hash": f"plan {replicate}", "planned_requests": 1}
    return GateRun(
        Manifest.model_validate({**facts, "replicate": replicate, "backend": "sim", **manifest}),
        "",
        replicate,
        num_requests,
        {name: Value(value) for name, value in values.items()},
    )


def runs_of(figures: Mapping[str, Sequence[float]], **of_run: object) -> list[GateRun]:
    """Runs whose figures are these, replicate by replicate."""
    columns = zip(*figures.values(), strict=True)
    return [a_run(place, dict(zip(figures, row, strict=True)), **of_run) for place, row in enumerate(columns)]


USUAL = [name for name, figure in FIGURES.items() if figure.limit is not None]
BASE = {name: [10.0, 11.0, 12.0, 10.5] for name in FIGURES}
NOISE = np.array([0.999, 1.001, 1.0005, 0.9995])


def times(factor: float, *names: str) -> dict[str, list[float]]:
    """The baseline's figures with a little noise, those named times ``factor``."""
    return {name: list(np.array(row) * NOISE * (factor if name in names else 1)) for name, row in BASE.items()}


def test_equal_runs_pass_and_one_worse_figure_is_named() -> None:
    assert judge(runs_of(times(1.0)), runs_of(BASE), gate_policy()).verdict is PASS
    result = judge(runs_of(times(1.03, "tpot")), runs_of(BASE), gate_policy())
    assert result.verdict is WORSE
    assert [test.figure for test in result.tests if test.verdict is WORSE] == ["tpot"]
    better = judge(runs_of(times(0.5, "cost", "ttft_p99")), runs_of(BASE), gate_policy())
    assert better.verdict is PASS


def test_ends_of_a_gates_interval_never_read_as_one_number() -> None:
    new = {name: list(np.array(row) * (1 + 1e-5 * (NOISE - 1))) for name, row in BASE.items()}
    result = judge(runs_of(new), runs_of(BASE), gate_policy(["tpot"]))
    (test,) = result.tests
    assert f"{test.low:.4f}" == f"{test.high:.4f}"
    (row,) = shown_tables(result)[0].records()
    low, high = str(row["interval"]).split("\u2013")
    assert low != high


def test_the_one_pair_that_decides_and_a_skew_are_said() -> None:
    base = {"cost": [10.0] * 8}
    even = [10.0, 10.01, 9.99, 10.005, 9.995, 10.01, 9.99, 10.0]
    policy = gate_policy(["cost"])
    assert not any(
        "decides" in note or "skew" in note for note in judge(runs_of({"cost": even}), runs_of(base), policy).notes
    )
    result = judge(runs_of({"cost": [*even[:5], 11.0, *even[6:]]}), runs_of(base), policy)
    assert result.verdict is CANNOT_TELL
    assert result.notes[0].startswith("cost of base: replicate 5 decides: without it, pass; skew +2.")


def read_late(runs: Sequence[GateRun], share: float) -> list[GateRun]:
    """The same runs, whose first tokens may have come earlier than they were read, by this share."""
    name = "ttft_p50"
    amounts = [value.amount for run in runs if (value := run.values[name]) is not None]
    return [
        replace(run, bounds={name: Bounds(amount / (1 + share), amount)})
        for run, amount in zip(runs, amounts, strict=True)
    ]


def test_what_tokens_read_late_leave_open_is_no_pass_and_not_worse() -> None:
    policy, base, slower = gate_policy(["ttft_p50"]), runs_of(BASE), runs_of(times(1.08, "ttft_p50"))
    assert judge(runs_of(times(1.0)), base, policy).verdict is PASS
    # The baseline may have been faster than was read.
    (test,) = judge(runs_of(times(1.0)), read_late(base, 0.06), policy).tests
    assert (test.verdict, test.more_blocks) == (CANNOT_TELL, None)
    assert test.why.startswith("tokens were read late: the ratio may be 1.000 to 1.060")
    assert judge(runs_of(times(0.9, "ttft_p50")), read_late(base, 0.06), policy).verdict is PASS
    # New runs may not be as slow as they seem.
    assert judge(slower, base, policy).verdict is WORSE
    assert judge(read_late(slower, 0.06), base, policy).verdict is CANNOT_TELL


def test_joules_that_their_sampling_leaves_open_are_no_pass() -> None:
    policy, new = gate_policy(thresholds=["energy=1.05"], figures=["energy"]), runs_of(times(1.0))
    assert judge(new, runs_of(BASE), policy).verdict is PASS
    sampled = [
        replace(run, bounds={"energy": Bounds(0.94 * amount, 1.06 * amount)})
        for run, amount in zip(runs_of(BASE), BASE["energy"], strict=True)
    ]
    (test,) = judge(new, sampled, policy).tests
    assert test.verdict is CANNOT_TELL
    assert test.why.startswith("power was sampled: the ratio may be 0.943 to 1.064")


def test_a_ratio_at_its_limit_cannot_be_told_and_is_no_pass() -> None:
    result = judge(runs_of(times(1.01, "cost")), runs_of(BASE), gate_policy())
    assert result.verdict is CANNOT_TELL
    (test,) = [test for test in result.tests if test.verdict is CANNOT_TELL]
    assert (test.figure, test.why) == ("cost", "the interval holds the limit")
    assert test.low < 1.01 < test.high


def test_a_worse_figure_outweighs_one_that_cannot_be_told() -> None:
    assert judge(runs_of(times(1.05, "cost"), num_requests=5), runs_of(BASE), gate_policy()).verdict is WORSE


def test_thresholds_move_the_limit_and_figures_choose_what_is_judged() -> None:
    new = runs_of(times(1.03, "tpot"))
    assert judge(new, runs_of(BASE), gate_policy(thresholds=["tpot=1.05"])).verdict is PASS
    only = judge(new, runs_of(BASE), gate_policy(["cost", "reuse"]))
    assert [test.figure for test in only.tests] == ["cost", "reuse"]
    both = judge(new, runs_of(BASE), gate_policy(["cost"], ["tpot=1.01"]))
    assert [test.figure for test in both.tests] == ["cost", "tpot"]


@pytest.mark.parametrize("wrong", ["tpot", "tpot=", "tpot=0.9", "tpot=nan", "speed=1.1"])
def test_a_threshold_of_no_figure_or_no_ratio_is_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"threshold|no figure of the gate"):
        gate_policy(thresholds=[wrong])


def test_two_pairs_have_no_interval_and_one_more_is_asked_for() -> None:
    short = {name: row[:2] for name, row in BASE.items()}
    tests = judge(runs_of(short), runs_of(short), gate_policy()).tests
    assert {(test.verdict, test.more_blocks) for test in tests} == {(CANNOT_TELL, 1)}


def test_a_p99_of_few_requests_is_not_judged_and_the_blocks_that_carry_it_are_named() -> None:
    short = runs_of(BASE, num_requests=100)
    result = judge(short, short, gate_policy(USUAL))
    (test,) = [test for test in result.tests if test.verdict is not PASS]
    assert (test.figure, test.verdict, test.more_blocks) == ("ttft_p99", CANNOT_TELL, 6)
    assert test.why == "400 requests a side, 1,000 are needed, about 10 blocks"
    # By default it is left out and named.
    result = judge(short, short, gate_policy())
    assert result.verdict is PASS
    assert "ttft_p99" not in {test.figure for test in result.tests}
    (note,) = [note for note in result.notes if note.startswith("left out")]
    assert note == (
        "left out: ttft_p99 of base, 400 requests a side, 1,000 are needed, about 10 blocks; "
        "to judge it all the same: --figure ttft_p99"
    )
    asked = judge(short, short, gate_policy(thresholds=["ttft_p99=1.2"]))
    assert asked.verdict is CANNOT_TELL


def test_a_figure_without_a_limit_is_judged_when_it_is_given_one() -> None:
    with pytest.raises(SpecError, match="itl_p50 has no limit of its own"):
        gate_policy(["itl_p50"])
    (test,) = judge(runs_of(BASE), runs_of(BASE), gate_policy(["itl_p50"], ["itl_p50=1.05"])).tests
    assert (test.verdict, test.unit) == (PASS, "ms")


def test_the_blocks_that_are_missing_tell_with_the_power_that_was_asked_for() -> None:
    spread = [math.exp(value) for value in (0.02, -0.02, 0.01, -0.01)]
    ratios = list(np.array(BASE["cost"]) * spread)
    new, base = runs_of({"cost": ratios}), runs_of({"cost": BASE["cost"]})
    judged = judge(new, base, gate_policy(["cost"], power=0.8))
    (test,) = judged.tests
    assert "more blocks would tell (--resume on both sides, then --look 2)" in "".join(gate_lines(judged))
    assert test.verdict is CANNOT_TELL
    values = np.array(ratios) / np.mean(ratios) - np.array(BASE["cost"]) / np.mean(BASE["cost"])
    effect, sd = math.log(test.ratio) - math.log(1.01), float(np.std(values, ddof=1))
    # The next look has a fifth of alpha, less what it leaves to later ones.
    planned = PlannedTest(sd, 0.05 * 0.16)
    reached = [planned.power(4 + more, effect, "superiority") for more in (test.more_blocks - 1, test.more_blocks)]
    assert reached[0] < 0.8 <= reached[1]


def drawn(rng: np.random.Generator, mean: float, num_blocks: int, sd: float = 0.01) -> list[float]:
    return list(10.0 * np.exp(mean + sd * rng.standard_normal(num_blocks)))


def test_a_printed_end_beyond_the_limit_and_the_verdict_are_the_same_thing() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        ratios = {name: drawn(rng, float(rng.choice([0.0, 0.01, 0.03])), 6) for name in ("cost", "tpot")}
        base = runs_of({name: [10.0] * 6 for name in ratios})
        for test in judge(runs_of(ratios), base, gate_policy(["cost", "tpot"])).tests:
            assert (test.verdict is WORSE) == (test.low > test.limit)
            assert (test.verdict is PASS) == (test.high < test.limit)


def test_looks_that_are_counted_keep_alpha() -> None:
    """Servers at the limit; were each look the first, more of them would pass or be called worse than alpha allows."""
    rng = np.random.default_rng(2)
    policies = [gate_policy(["cost"], look=look) for look in range(1, 7)]
    passes = worse = plain = 0
    experiments = 60
    for _ in range(experiments):
        runs = runs_of({"cost": drawn(rng, math.log(1.01), 24)})
        base = runs_of({"cost": [10.0] * 24})
        looks = [(runs[:n], base[:n]) for n in range(4, 25, 4)]
        verdicts = [judge(*look, policy).verdict for look, policy in zip(looks, policies, strict=True)]
        passes += PASS in verdicts
        worse += WORSE in verdicts
        plain += any(judge(*look, policies[0]).verdict is PASS for look in looks)
    most = 0.05 * experiments + 3 * math.sqrt(experiments * 0.05 * 0.95)
    assert max(passes, worse) <= most < plain
    assert sum(policies[0].share(look) for look in range(1, 50)) <= 0.05


def test_runs_are_paired_by_plan_and_the_rest_is_left_out_in_the_open() -> None:
    base = runs_of({"cost": [10.0, 11.0, 12.0, 99.0]})
    new = [*reversed(base[:3]), a_run(7, {"cost": 1.0}, plan_hash="another")]
    result = judge(new, base, gate_policy(["cost"]))
    assert [(test.num_pairs, test.ratio) for test in result.tests] == [(3, pytest.approx(1))]
    assert "base: 2 runs without a partner of the same plan were left out" in result.notes


def test_the_repeats_of_one_plan_are_paired_in_order() -> None:
    base = runs_of({"cost": [10.0, 11.0, 12.0]}, plan_hash="the same")
    assert judge(base[:2] * 2, base, gate_policy(["cost"])).tests[0].num_pairs == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"backend": "emulator"}, "kind of server"),
        ({"clock": {"scale": 8.0}}, "time scale"),
        ({"requested": {"experiment": {"window": {"warmup_s": 5.0}}}}, "measurement window"),
        ({"requested": {"client": {"stream": False}}}, "answers as a stream"),
        ({"plan_hash": "another"}, "no new run has the plan"),
    ],
)
def test_sides_that_make_pairs_meaningless_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        judge(runs_of(BASE, **change), runs_of(BASE), gate_policy())


def test_settings_and_releases_that_differ_are_said() -> None:
    served = {"facts": {"launch": {"requested": {"versions": {"vllm-rbln": "0.12.0"}}}}}
    new = runs_of(BASE, requested={"server": {"kv_slots": 16}}, server=served)
    notes = judge(new, runs_of(BASE, requested={"server": {"kv_slots": 8}}), gate_policy()).notes
    assert "server.kv_slots: 8 in the baseline, 16 now" in notes
    assert "vllm-rbln: not known in the baseline, 0.12.0 now" in notes


def test_a_condition_that_the_new_runs_lack_cannot_be_told() -> None:
    base = [*runs_of(BASE), *runs_of(BASE, condition="more")]
    result = judge([*runs_of(BASE), *runs_of(BASE, condition="new one")], base, gate_policy())
    assert result.verdict is CANNOT_TELL
    assert {test.condition for test in result.tests if test.verdict is CANNOT_TELL} == {"more"}
    assert "new one: not judged, the baseline has no such condition" in result.notes


def test_a_figure_that_neither_side_observed_is_judged_only_when_it_is_asked_for() -> None:
    seen = {"cost": BASE["cost"]}
    default = judge(runs_of(seen), runs_of(seen), gate_policy())
    assert ([test.figure for test in default.tests], default.verdict) == (["cost"], PASS)
    assert any("left out: ttft_p50 of base, not observed in 4 of 4 pairs" in note for note in default.notes)
    asked = judge(runs_of(seen), runs_of(seen), gate_policy(["cost", "padding"]))
    assert asked.verdict is CANNOT_TELL
    lost = judge(runs_of(seen), runs_of(BASE), gate_policy(["tpot"]))
    assert lost.tests[0].why == "not observed in 4 of 4 pairs"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    spec = small_experiment(backend="sim", replicates=3, condition=[{"name": "base"}])
    return list(run_experiment(spec, runs_root=tmp_path_factory.mktemp("gate")).require_valid().runs)


def test_a_sealed_run_has_every_figure_and_equals_itself(sealed: list[SealedRun]) -> None:
    runs = [gate_run(run) for run in sealed]
    assert all(set(run.values) == set(FIGURES) for run in runs)
    # No power is sampled in virtual time.
    known = {name for name, one in FIGURES.items() if not (one.target or name.startswith("energy"))}
    assert all(run.values[name] for run in runs for name in known)
    result = judge(runs, runs, gate_policy(["cost", "tpot", "reuse", "padding"]))
    assert (result.verdict, {test.ratio for test in result.tests}) == (PASS, {1.0})
    assert "no accelerator was measured" in result.origin
