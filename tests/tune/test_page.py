"""The page of a tune says the answer first, names what is simulated, and has the numbers of its pictures in a table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.compare.drawn import DrawnRatio
from harness.errors import ExitCode, RecordsError
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.model.spec.base import tomllib
from harness.tune.answer import answer, to_copy, tuned_text
from harness.tune.confirm import BEST, SMALLEST, Confirmed, Measured, base_of, first_look
from harness.tune.explore import Explored
from harness.tune.folder import TuneFolder
from harness.tune.page import TuneResult, tune_page, unbroken
from harness.tune.predict import Option
from harness.tune.setups import Baseline, Setup
from harness.tune.targets import Capacity
from tests.tune.test_price import SEEN

pytestmark = pytest.mark.same_everywhere


def experiment(backend: str = "sim", **server: object) -> ExperimentSpec:
    table = {"name": "small", "backend": backend, "server": server, "condition": [{"name": "base"}]}
    return parse_experiment(table, where="test")


def option(setup: Setup, ratio: float) -> Option:
    base = Baseline(experiment().server)
    drawn = DrawnRatio(ratio, 0.002, 100)
    memory, seconds = base.memory_gib(setup), base.compile_s(setup)
    return Option(setup, base.words(setup), drawn, ratio - 0.02, ratio + 0.02, 0.02, 0.9, memory, seconds)


SLOTS = option(Setup(8, (1, 2, 4, 8), 16, None), 0.93)
BOTH = option(Setup(16, (1, 4, 6, 8, 10, 16), 16, None), 0.922)


def explored(smallest: Option | None = SLOTS, best: Option | None = BOTH) -> Explored:
    base = Baseline(experiment().server).setup
    screened = ((SLOTS.setup, 0.93), (BOTH.setup, 0.92))
    ceiling = DrawnRatio(0.91, 0.002, 100)
    return Explored(base, ceiling, (BOTH, SLOTS), best, smallest, ("kv_slots: up to 16",), 700, 1000, screened)


def shown(name: str, saving: float, verdict: str = "less") -> Confirmed:
    return Confirmed(name, saving, saving - 0.02, saving + 0.02, verdict, 12, "a")


def measured(*each: Confirmed) -> Measured:
    return Measured(each)


def test_the_smallest_change_is_the_answer_where_the_best_is_not_shown_to_be_better() -> None:
    found = answer(experiment(), explored(), measured(shown(SMALLEST, 0.07), shown(BEST, 0.075)))
    assert found.state == "confirmed"
    assert found.option == SLOTS
    assert found.sentence == "16 KV slots in place of 8: 7.0 % less device time (5.0 to 9.0), confirmed (simulated)."
    assert found.rests == (
        "On 12 new plans (simulated); largest predicted saving: compile {1,4,6,8,10,16} for 16 requests at once: "
        "7.5 % less device time (5.5 to 9.5)."
    )
    better = answer(experiment(), explored(), Measured((shown(SMALLEST, 0.04), shown(BEST, 0.09)), best_is_better=True))
    assert better.option == BOTH


def test_what_is_not_told_apart_keeps_what_runs_today_and_leaves_with_its_own_code() -> None:
    found = answer(experiment(), explored(), measured(shown(SMALLEST, 0.01, ""), shown(BEST, 0.012, "")))
    assert found.state == "not told apart"
    assert found.exit_code is ExitCode.CANNOT_TELL
    assert found.sentence.startswith(
        "Keep {1,2,4,8}/8 for now: 16 KV slots in place of 8 is not told apart (1.0 % less"
    )
    assert found.option is None
    assert found.rests.endswith(" To tell them apart: more plans by a longer --budget, with --runs of a new folder.")
    felt = replace(shown(SMALLEST, 0.01, ""), felt="TTFT p50 12 ms in place of 13 ms")
    on_gpu = answer(experiment("vllm", model="any"), explored(), measured(felt)).rests
    assert "; measured TTFT p50 12 ms in place of 13 ms. To tell them apart: a quieter host or more plans" in on_gpu
    torn = Confirmed(SMALLEST, 0.05, 0.02, 0.08, "", 12, "a", "A gives .95 and B 1.02")
    assert "withheld: A gives .95 and B 1.02." in answer(experiment(), explored(), measured(torn)).rests
    dearer = answer(experiment(), explored(), measured(shown(SMALLEST, -0.03, "more"), shown(BEST, -0.04, "more")))
    assert dearer.state == "keep"
    assert "16 KV slots in place of 8 costs more (3.0 % more device time (1.0 to 5.0))" in dearer.sentence


def test_where_every_plan_sends_the_same_requests_nothing_is_said_of_new_ones() -> None:
    table = {"name": "small", "backend": "sim", "condition": [{"name": "base"}]}
    again = parse_experiment({**table, "workload": {"source": "trace", "trace": "research-agent"}}, where="test")
    found = answer(again, explored(), measured(shown(SMALLEST, 0.07)))
    assert found.rests.startswith("On 12 repeats of the same sessions (simulated)")
    page = tune_page(TuneResult(again, found, None, explored()))
    assert "Other sessions: every plan sends the same ones." in page
    assert "new plans" not in page
    look = first_look(explored(), 12, again)
    assert look.endswith("less; whether repeats tell it from today's, the spread of the server's own runs decides")
    assert first_look(explored(), 12, experiment()).endswith(", if that is right and plans alone make runs differ")


def test_of_a_vllm_that_captures_nothing_no_sizes_are_named() -> None:
    eager = replace(explored(None, None), baseline=Setup(5, (), None, 2048), options=())
    assert eager.baseline.label == "5 requests at once, 2048 blocks"
    spec = experiment("attached", url="http://127.0.0.1:8000", rules="vllm-paged")
    page = tune_page(TuneResult(spec, answer(spec, eager), SEEN, eager))
    assert "than 9.0 % (memory without end)." in page


def test_the_best_is_marked_where_the_plans_that_are_printed_have_a_lower_one() -> None:
    lower = option(Setup(12, (1, 4, 12), 16, None), 0.921)
    found = replace(explored(), options=(lower, BOTH, SLOTS))
    assert [line.partition("<- ")[2] for line in found.lines()][-3:] == ["", "best, by other plans", "smallest"]
    assert "by other plans" not in "".join(explored().lines())


def test_by_costs_that_are_not_of_this_server_nothing_is_kept() -> None:
    borrowed = "no costs of this server are known; the search assumes those of 'emulated-gpu'"
    dearer = measured(shown(SMALLEST, -0.03, "more"), shown(BEST, -0.04, "more"))
    for found in (
        answer(experiment("vllm", model="any"), explored(None, None), borrowed=borrowed),
        answer(experiment("vllm", model="any"), explored(), dearer, borrowed=borrowed),
    ):
        assert found.sentence == "Cannot tell without a calibration of this server."
        assert found.exit_code is ExitCode.CANNOT_TELL
        assert "'emulated-gpu'" in found.rests
        assert "harness server calibrate" in found.rests


@pytest.mark.parametrize("verdict", ["less", "more", "equal", "", "predicted"])
def test_the_sentence_has_25_words_at_most_whatever_changes(verdict: str) -> None:
    wide = option(Setup(32, tuple(range(1, 33)), 64, None, prefix_caching=False), 0.93)
    wide = replace(wide, words=f"{wide.words}, and some other change that takes ten words more")
    runs = measured() if verdict == "predicted" else measured(shown(BEST, 0.01, verdict))
    found = answer(experiment(), explored(wide, wide), runs)
    assert len(found.sentence.split()) <= 25, found.sentence


def test_an_emulator_that_somebody_else_started_is_called_emulated() -> None:
    spec = experiment("attached", url="http://127.0.0.1:8000")
    runs = measured(shown(SMALLEST, 0.07), shown(BEST, 0.075))
    emulated = answer(spec, explored(), runs, backend="attached-emulator")
    assert emulated.sentence.endswith(", confirmed (emulated).")
    assert answer(spec, explored(), runs, backend="attached").sentence.endswith(", confirmed.")


def test_only_a_prediction_is_called_predicted() -> None:
    found = answer(experiment(), explored())
    assert found.state == "predicted"
    assert "predicted, not measured" in found.sentence
    assert "confirmed" not in found.sentence
    kept = answer(experiment(), explored(None, None))
    assert kept.state == "keep"
    assert kept.option is None


DRAFTS = {"num_speculative_tokens": 1, "speculative_method": "mtp", "synthetic_acceptance_rates": [0.7]}


@pytest.mark.parametrize(
    ("backend", "server", "command"),
    [
        ("emulator", {}, "harness server emulator --max-num-seqs 8 --decode-buckets 1,2,4,8 --kv-slots 16"),
        (
            "rbln",
            {"artifact": "model"},
            "harness server compile FILE --set batch_size=8 --set 'decoder_batch_sizes=[1, 2, 4, 8]' --set kvcache_num",
        ),
        ("vllm", {"model": "Qwen/Qwen3-4B"}, "vllm serve Qwen/Qwen3-4B --max-num-seqs 8"),
        ("vllm", {"model": "Qwen/Qwen3-4B", "block_size": 32}, " --block-size 32"),
        # Synthetic acceptance makes text without meaning: it is for runs, not for who serves.
        (
            "vllm",
            {"model": "m", **DRAFTS},
            """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""",
        ),
        (
            "emulator",
            {"rules": "vllm-paged", "cost_model": "emulated-gpu"},
            "harness server emulator --rules vllm-paged --cost-model emulated-gpu --max-num-seqs 8",
        ),
        ("emulator", {"rules": "vllm-paged", **DRAFTS}, """ '{"method": "mtp", "num_speculative_tokens": 1}'"""),
    ],
)
def test_the_command_to_copy_is_that_of_the_backend(backend: str, server: dict[str, object], command: str) -> None:
    spec = experiment(backend, **server)
    chosen = answer(spec, explored(), measured(shown(SMALLEST, 0.07), shown(BEST, 0.075)))
    base = base_of(spec, explored())
    assert any(command in line for line in to_copy(spec, chosen, base))
    assert "max_num_seqs" in tomllib.loads(tuned_text(spec, chosen, base))["server"]


def test_a_page_says_first_what_came_has_every_number_in_a_table_and_calls_no_simulation_measured() -> None:
    found = answer(experiment(), explored(), measured(shown(SMALLEST, 0.07), shown(BEST, 0.075)))
    page = tune_page(TuneResult(experiment(), found, None, explored()))
    words = re.sub(r"<[^>]+>", " ", page)
    assert unbroken(found.sentence) in words
    for number in ("0.9220 +- 0.0020", "0.9300 +- 0.0020", "0.9300 (0.9100 to 0.9500)", "0.9250 (0.9050 to 0.9450)"):
        assert number in words
    assert "<script" not in page
    assert page.count("<svg") == 2
    assert page.index('tune-answer">') < page.index("<h1>") < page.index("confirmed (simulated)</b>")
    assert "simulated on new plans, ratio (95 %)" in page
    assert "measured" not in page.partition("<body>")[2]
    spec = experiment("attached", url="http://127.0.0.1:8000")
    real = tune_page(
        TuneResult(spec, answer(spec, explored(), Measured(found.measured), backend="attached"), None, explored())
    )
    assert "measured, ratio (95 %)" in real
    lower = replace(explored(), options=(BOTH, replace(SLOTS, ratio=DrawnRatio(0.9, 0.002, 100))))
    assert "best was chosen on other plans" in tune_page(TuneResult(spec, found, None, lower))
    assert "best was chosen on other plans" not in page


def test_the_bar_of_the_chosen_is_as_long_as_the_answer_says() -> None:
    found = answer(experiment(), explored(), measured(shown(SMALLEST, 0.07), shown(BEST, 0.075)))
    before = replace(SEEN, num_runs=12)
    result = TuneResult(experiment(), found, None, explored(), before, replace(before, device_ns=91))
    assert "93.0 %</span>" in tune_page(result)


def test_a_picture_is_against_what_the_search_changed() -> None:
    own = explored()
    label = 'aria-label="Predicted device time of every configuration against {}"'
    plain = tune_page(TuneResult(experiment(), answer(experiment(), own), None, own))
    assert label.format("KV slots and compiled sizes") in plain
    limits = [own.baseline._replace(max_num_seqs=limit) for limit in (4, 8, 16)]
    other = replace(own, screened=tuple((setup, 0.9) for setup in limits))
    page = tune_page(TuneResult(experiment(), answer(experiment(), other), None, other))
    assert label.format("requests at once") in page


def test_what_a_search_found_is_read_again_as_it_was(tmp_path: Path) -> None:
    folder = TuneFolder(tmp_path)
    assert folder.keep_explored(explored()) == explored() == folder.explored()
    capacities = [Capacity("today", Setup(8, (1, 8), 8, None), 12)]
    assert folder.capacities(lambda: capacities) == capacities == folder.capacities(list)
    (tmp_path / "explored.json").write_text('{"format": 2, "found": {"best": 1}}')
    with pytest.raises(RecordsError, match=r"explored.json: is damaged\. Remove it"):
        folder.explored()


def test_another_policy_is_copied_as_a_table_that_can_be_read() -> None:
    spec = experiment(replicas=2, router={"policy": "round-robin"})
    base = Baseline(spec.server)
    routed = replace(SLOTS, setup=base.setup._replace(policy="least-requests"), words="routing by least-requests")
    own = replace(explored(routed, routed), baseline=base.setup, options=(routed,), screened=((routed.setup, 0.9),))
    page = tune_page(TuneResult(spec, answer(spec, own), None, own))
    copied = page.partition("[server]")[2].partition("</pre>")[0].replace("&quot;", '"')
    assert tomllib.loads(copied) == {"router": {"policy": "least-requests"}}
