"""The HTML report through its public door: what it says, and that it opens anywhere."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.analysis.summary import summarise
from harness.errors import SpecError
from harness.judge.catalogue import AnalysisResult
from harness.judge.decisions.decide import Decision, Outcome
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.present.report import write_report
from harness.present.report.page import render_page
from harness.present.report.timeline import Bar, TimelineView, drawn_lanes
from harness.present.report.view import Results, gather
from harness.table import Table, to_rich
from tests.support.bare_reports import with_figures
from tests.support.report_runs import Shape, seal_demo, seal_run

RIGHT_TO_LEFT = "\u202e"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
SECTION_IDS = (
    "conditions",
    "steps",
    "timeline",
    "reuse",
    "reuse-by-wait",
    "harness",
    "what",
    "reproduce",
    "findings",
    "glossary",
)


class Page(HTMLParser):
    """A parsed report: fails on tags that do not nest; keeps ids, references and the text that people see."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.open_words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open_tags, f"never closed: {self.open_tags}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "action", "data", "poster"):
                self.references.append(value or "")
        if tag not in VOID:
            is_folded = (tag == "details" and ("open", None) not in attrs) or tag == "template"
            self.open_tags.append(f"{tag} folded" if is_folded else tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        assert self.open_tags[-1].partition(" ")[0] == tag, f"</{tag}> closes <{self.open_tags[-1]}>"
        self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        if not self.open_tags or self.open_tags[-1] not in ("script", "style"):
            self.words.append(data)
            if not any(tag.endswith(" folded") for tag in self.open_tags):
                self.open_words += data.split()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def written(runs: Sequence[SealedRun], path: Path, *, draws: bool = False, **options: Any) -> Path:
    """What ``write_report`` writes; draws: its figures too, which only tests that look at them need."""
    with with_figures() if draws else nullcontext():
        return write_report(runs, path, **options)


def report(runs: Sequence[SealedRun], folder: Path, **options: Any) -> Page:
    return Page(written(runs, folder / "report.html", **options).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    return seal_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def demo(demo_runs: list[SealedRun], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(demo_runs, tmp_path_factory.mktemp("page"), draws=True)


def test_every_section_is_there_and_reachable(demo: Page) -> None:
    assert set(SECTION_IDS) <= set(demo.ids)
    assert {f"#{section}" for section in SECTION_IDS} <= set(demo.references)


def test_the_answer_comes_first_and_little_else_is_open(demo: Page) -> None:
    assert len(demo.open_words) <= 2_260
    opening = " ".join(demo.open_words)
    assert opening.index("bucket6-waits costs") < opening.index("Time is scaled") < opening.index("Serving figures")


def test_each_section_opens_with_what_to_look_at(demo: Page) -> None:
    for section in SECTION_IDS:
        opening = demo.html[demo.html.index(f'id="{section}"') :]
        assert re.match(r'[^>]*>.*?</h2>.*?\s*(</summary>)?\s*<p class="lead">[A-Z]', opening, re.DOTALL), section


def test_each_symbol_has_its_meaning_and_leads_to_its_glossary_entry(demo: Page) -> None:
    found = dict(re.findall(r'<a class="sym" href="#(g-[a-z]+)" data-tip="[^"]{20,}">([^<]+)</a>', demo.html))
    assert {"g-a": "A", "g-b": "B", "g-padding": "p", "g-waiting": "W", "g-agreement": "τ"}.items() <= found.items()
    for entry in found:
        assert re.search(rf'<dt id="{entry}">.*?Method: “[^”]+”', demo.html), entry


def test_the_glossary_has_the_words_of_this_page_alone(demo: Page, tmp_path: Path) -> None:
    def terms(page: Page) -> str:
        return page.html.partition('<dl class="glossary">')[2]

    assert "agreement, \u03c4" in terms(demo)
    predicted = report(seal_demo(tmp_path, num_replicates=1, backend="sim", time_scale=1.0), tmp_path)
    assert "cost ratio" in terms(predicted)
    assert "dispatch lag" not in terms(predicted)


def test_nothing_outside_the_file_is_referenced(demo: Page) -> None:
    outside = [one for one in demo.references if not one.startswith(("#", "data:text/csv;base64,"))]
    # Links to the runs' own folders, beside the page, and nothing that a browser loads by itself.
    assert outside
    assert all(re.fullmatch(r"(\.{1,2}/)*[\w./-]+/demo/[\w-]+/\d", one) for one in outside)
    assert not re.findall(r"https?:|@import|//[a-z]+\.", demo.html)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", demo.html))


def test_ids_are_unique_and_references_resolve(demo: Page) -> None:
    assert len(demo.ids) == len(set(demo.ids))
    assert {reference[1:] for reference in demo.references if reference.startswith("#")} <= set(demo.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", demo.html)) <= set(demo.ids)


def test_plots_follow_the_theme(demo: Page) -> None:
    plots = re.findall(r"<svg.*?</svg>", demo.html, flags=re.DOTALL)
    assert [color for plot in plots for color in re.findall(r"#[0-9a-fA-F]{6}\b", plot)] == []
    assert "prefers-color-scheme: dark" in demo.html
    assert "@media print" in demo.html


def test_plots_are_described_for_those_who_cannot_see_them(demo: Page) -> None:
    plots = re.findall(r'<svg role="img"[^>]*>', demo.html)
    # Cost and reuse by wait (wide and narrow), serving, steps, reuse, lateness, and a timeline per run.
    assert len(plots) == 8 + 12
    assert all(re.search(r'aria-label="[^"]{20,}"', plot) for plot in plots)


def test_bars_of_many_rearrivals_are_one_shape_for_each_kind_and_panel(demo: Page, demo_runs: list[SealedRun]) -> None:
    (plot,) = re.findall(r"<svg(?:(?!</svg>).)*reuse-figure.*?</svg>", demo.html, flags=re.DOTALL)
    panels = len({run.condition for run in demo_runs})
    frames = 1 + 3 * panels  # of the figure, and of each panel
    assert plot.count('id="reuse-patch_') == frames + 2 * panels


def test_figures_of_the_analysis_appear(demo: Page, demo_runs: list[SealedRun]) -> None:
    for condition in summarise(demo_runs).conditions:
        expected = [condition.name, f"{condition.a_ns / 1e9:,.3f}", f"{condition.b_ns / 1e9:,.3f}"]
        expected += [f"{condition.padding.ratio:.4f}", f"{condition.num_steps:,}", f"{condition.reuse.reused_tokens:,}"]
        expected += [
            f"{condition.reuse.num_reused} of {condition.reuse.num_rearrivals}",
            f"{condition.computed_prefill_tokens:,}",
        ]
        if condition.comparison is not None:
            expected += [f"{condition.comparison.ratio_a:.4f}", f"{condition.comparison.ratio_b:.4f}"]
        assert [figure for figure in expected if figure not in demo.text] == []


def test_the_answer_compares_each_condition_with_its_own_baseline(demo: Page) -> None:
    ends = r"[\d.]+(?: % less)? to [\d.]+ % (?:less|more)"
    interval = rf"\({ends}\)"
    verdict = "(?:cheaper|no difference shown)"
    for name in ("waits", "nowaits"):
        answer = rf"bucket6-{name} costs [\d.]+ % less than base-{name} {interval} ?: {verdict} ?\."
        assert re.search(answer, demo.text)
    assert "6 valid runs, emulated" in demo.text
    assert "95 % interval over 3 comparisons, cost model assumed exact ; both channels agree" in demo.text
    assert "an interval of 3 replicates may hold too seldom" in demo.text
    assert re.search(r"Padding \d+\.\d % \u2192 \d+\.\d %", demo.text)


def test_scaled_time_is_said_everywhere(demo: Page) -> None:
    assert "Time is scaled: model time, \u00d74." in demo.text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", demo.html, flags=re.DOTALL)
    assert len(captions) == 6
    assert all("Model time, \u00d74" in caption or "Wall time" in caption for caption in captions)
    assert "time since the start [model s, \u00d74]" in demo.text


def test_what_was_run_names_changes_hashes_and_machine(demo: Page, demo_runs: list[SealedRun]) -> None:
    assert "decode_buckets {1,2,4,8} \u2192 {1,2,4,6,8}" in demo.text
    assert all(run.manifest.plan_hash[:12] in demo.text for run in demo_runs)
    assert "base_seed 20260101" in demo.text
    assert "harness run plans/experiments/demo.toml" in demo.text


def test_the_harness_reports_on_itself(demo: Page) -> None:
    assert "The harness itself" in demo.text
    for name in ("dispatch delay p99", "start spread", "early sends", "requests in a stall", "floor p50"):
        assert name in demo.text
    assert "\u2264 10" in demo.text  # the limit itself, beside what it was held against


def test_stalls_of_the_machine_are_marked_on_the_timeline(demo_runs: list[SealedRun], tmp_path: Path) -> None:
    with_stall = written(demo_runs[:1], tmp_path / "r.html").read_text(encoding="utf-8")
    without = written([seal_run(tmp_path, Shape(has_audit=False))], tmp_path / "q.html").read_text(encoding="utf-8")
    assert with_stall.count('class="t-stall"') == 1 + without.count('class="t-stall"')


def test_only_a_run_on_a_real_server_is_taken_for_one_on_a_device(demo: Page, tmp_path: Path) -> None:
    real, twin = (
        report([seal_run(tmp_path / kind, Shape(time_scale=1.0, backend=kind))], tmp_path) for kind in ("rbln", "twin")
    )
    assert "No accelerator was measured" not in real.text
    assert "model time" not in real.text.lower()
    assert "No accelerator was measured. The server was the twin" in twin.text
    assert "No accelerator was measured." in demo.text


def test_a_condition_whose_baseline_never_ran_is_said_to_lack_it(tmp_path: Path) -> None:
    page = report([seal_run(tmp_path, Shape(condition="treated", baseline="base-waits"))], tmp_path)
    assert "treated cannot be compared with base-waits" in page.text


def test_invalid_runs_are_named_with_their_reasons_and_not_counted(tmp_path: Path) -> None:
    reason = "request-failed: session 5 request 1 got HTTP 500"
    runs = [seal_run(tmp_path), seal_run(tmp_path, Shape(replicate=1, fails=True, invalid_reasons=(reason,)))]
    page = report(runs, tmp_path)
    assert "1 of 2 runs is INVALID and not counted: base-waits/1" in page.text
    assert reason in page.text
    only_valid = summarise(runs[:1]).conditions[0]
    assert f"base-waits costs {only_valid.a_ns / 1e9:.3f} model s of modelled device time (A)" in page.text


def test_nothing_but_invalid_runs_still_makes_a_report(tmp_path: Path) -> None:
    shape = Shape(has_steps=False, has_chunks=False, fails=True, invalid_reasons=("server-died: exit status -9",))
    page = report([seal_run(tmp_path, shape)], tmp_path)
    assert "base-waits has no valid run, so its cost is not known." in page.text
    assert "server-died: exit status -9" in page.text


def test_missing_observations_are_dashes_and_words_not_zeros(tmp_path: Path) -> None:
    shape = Shape(has_chunks=False, has_audit=False, has_steps=False, num_requests=1)
    page = report([seal_run(tmp_path, shape)], tmp_path)
    assert "No run has a step log, so padding is not known." in page.text
    assert "No session re-arrived" in page.text
    assert "No self-audit ran with these runs" in page.text
    assert "the log carries no usable step times" in page.text
    assert "0.000 s on channel A" not in page.text


def test_sixty_four_sessions_and_a_dozen_runs_stay_a_small_file(tmp_path: Path) -> None:
    buckets = (1, 2, 4, 8, 16)
    runs = [
        seal_run(tmp_path, Shape(condition=name, replicate=k, num_sessions=64, num_requests=3, buckets=buckets))
        for k in range(2)
        for name in ("base-waits", "other")
    ]
    path = written(runs, tmp_path / "report.html", draws=True)
    assert path.stat().st_size < 3_000_000
    assert "64 sessions, 192 requests" in Page(path.read_text(encoding="utf-8")).text


def test_timelines_of_many_requests_draw_fewer_sessions_and_say_so() -> None:
    bar = Bar(0, 0, 0.0, 0.0, 0.1, 1.0, "first", "ok", 9, 9, 0)
    bars = tuple(replace(bar, session=session) for session in range(100) for _ in range(30))
    crowd = TimelineView("base/0", "base", 0, 100, bars, (), 1.0)
    assert [drawn_lanes(crowd, of) for of in (1, 3, 1000)] == [96, 40, 1]


def test_plots_are_the_same_whether_one_process_draws_them_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = gather([seal_run(tmp_path, Shape(condition="base"))])
    monkeypatch.setattr("harness.present.report.page.MIN_PARALLEL_S", math.inf)
    alone = render_page(view)
    monkeypatch.setattr("harness.present.report.page.MIN_PARALLEL_S", 0.0)
    assert render_page(view) == alone


def test_findings_of_one_kind_are_gathered(tmp_path: Path) -> None:
    torn = [Finding(code="log-torn", severity="warning", evidence=f"{k} lines torn", hint="Look") for k in range(3)]
    runs = [seal_run(tmp_path, Shape(replicate=k, findings=(finding,))) for k, finding in enumerate(torn)]
    page = report(runs, tmp_path)
    assert page.html.count("<code>log-torn</code>") == 1
    # The run's name leads to its timeline.
    assert "base-waits/2 : 2 lines torn" in page.text
    assert '<a href="#timeline-base-waits-2">base-waits/2</a>' in page.html


def test_text_from_records_cannot_become_markup(tmp_path: Path) -> None:
    nasty = '<script>alert("x")</script> & </h1>'
    shape = Shape(
        title=nasty,
        invalid_reasons=(nasty,),
        findings=(Finding(code="odd", severity="info", evidence=nasty, hint=nasty),),
        manifest={"provenance": {"argv": ["harness", nasty], "host": {nasty: nasty}}},
    )
    page = report([seal_run(tmp_path, shape)], tmp_path)
    assert "<script>alert" not in page.html
    assert nasty in page.text


def test_users_latencies_stand_beside_cost_and_lie_in_the_file_as_csv(demo: Page, demo_runs: list[SealedRun]) -> None:
    for one in summarise(demo_runs).serving:
        assert f"{one.tokens_per_s.mean:,.1f}" in demo.text
    addresses = [one for one in demo.references if one.startswith("data:text/csv;base64,")]
    tables = [base64.b64decode(one.partition(",")[2]).decode() for one in addresses]
    assert len(tables) == 4
    assert "ttft,ms" in tables[2]
    assert "too few runs" in demo.text
    assert "half of all runs like these" in demo.text


def test_the_experiments_own_analysis_and_decisions_are_shown(demo_runs: list[SealedRun], tmp_path: Path) -> None:
    table = Table("Table I", "What a row is.", ("condition", "padding"), (("base", 0.25),))
    decision = Decision("cost-validation", "bucket6", Outcome.PASS, "both channels agree", num_blocks=1)
    results = Results(AnalysisResult("demo", "alignment", (table,), ("a note",)), (decision,))
    page = Page(written(demo_runs, tmp_path / "r.html", results=results).read_text(encoding="utf-8"))
    for words in ("Table I", "0.2500", "a note", "PASS", "1 of 3 blocks", "both channels agree"):
        assert words in page.text


def test_reuse_by_wait_has_its_curve_and_table_where_sessions_return(demo: Page, tmp_path: Path) -> None:
    section = demo.html[demo.html.index('<h2 id="reuse-by-wait"') : demo.html.index('<h2 id="steps"')]
    assert section.count('<svg role="img"') == 2
    rows = re.findall(r"<tr>(?:(?!</tr>).)*?<td.*?</tr>", section, re.DOTALL)
    counted = [int(re.findall(r'<td class="num">([^<]*)</td>', row)[1]) for row in rows]
    assert sum(counted) == 4 * 3 * 6  # one return of each of six sessions
    assert "few runs" in section
    assert 'download="demo-reuse-by-wait.csv"' in demo.html
    alone = report(seal_demo(tmp_path, num_replicates=1, num_requests=1), tmp_path)
    assert "reuse-by-wait" not in alone.html


def test_a_title_and_the_timelines_can_be_chosen(demo_runs: list[SealedRun], tmp_path: Path) -> None:
    path = written(demo_runs, tmp_path / "r.html", title="My title", timelines=["base-nowaits/2"])
    page = Page(path.read_text(encoding="utf-8"))
    assert "My title" in page.text
    assert page.html.count('class="plot timeline"') == 1
    assert "base-nowaits , replicate 2" in page.text


def test_an_unknown_timeline_is_refused_by_name(demo_runs: list[SealedRun], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no sealed run 'nothing/0'.*base-waits/0"):
        written(demo_runs, tmp_path / "r.html", timelines=["nothing/0"])


def test_no_runs_and_runs_of_two_experiments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="exactly one experiment"):
        written([], tmp_path / "r.html")
    two = [seal_run(tmp_path), seal_run(tmp_path, Shape(experiment="other"))]
    with pytest.raises(SpecError, match="got demo, other"):
        written(two, tmp_path / "r.html")


def test_a_report_that_cannot_be_written_says_where(demo_runs: list[SealedRun], tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with pytest.raises(SpecError, match="is no folder") as caught:
        written(demo_runs[:1], in_the_way / "r.html")
    assert str(in_the_way) in str(caught.value)
    assert in_the_way.read_text() == "not a folder"


def test_writing_again_replaces_the_report_and_leaves_nothing_beside_it(
    demo_runs: list[SealedRun], tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "r.html"
    written(demo_runs[:1], path, title="first")
    written(demo_runs[:1], path, title="second")
    assert "second" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["r.html"]


def test_a_simulated_run_is_called_predicted_and_its_channels_never_agree(tmp_path: Path) -> None:
    page = report(seal_demo(tmp_path, num_replicates=1, backend="sim", time_scale=1.0), tmp_path, draws=True)
    assert "Predicted, not measured." in page.text
    assert "4 predicted runs, all valid" in page.text
    assert "Predicted: bucket6-waits costs" in page.text
    assert "agree" not in page.text.split("Glossary")[1].split("agreement, \u03c4")[0]
    assert "both channels agree" not in page.text
    assert "predicted cost ratio" in page.html


def test_a_noisy_baseline_means_that_nobody_can_tell(tmp_path: Path) -> None:
    # Half a second before every first token in both: the baseline's channels lie far apart, the ratios do not.
    slow = [Shape(slowdown=2), Shape(condition="slow", slowdown=2)]
    runs = [seal_run(tmp_path, shape) for shape in slow]
    page = report(runs, tmp_path)
    assert "Cannot tell: slow against base-waits" in page.text
    assert "both channels agree" not in page.text
    assert "channels-apart" in page.text


def test_conditions_that_did_other_work_are_compared_per_token_and_per_request(tmp_path: Path) -> None:
    runs = [seal_run(tmp_path), seal_run(tmp_path, Shape(condition="more", num_sessions=12))]
    page = report(runs, tmp_path)
    assert re.search(r"more (costs|against).*Other work: 24 requests", page.text)
    assert re.search(r"per request the ratio is \d", page.text)


def test_intervals_stand_beside_ratios_from_three_replicates_on(demo: Page, tmp_path: Path) -> None:
    assert "its 95 % interval over 3 comparisons (A: cost model assumed exact)" in demo.text
    few = report(seal_demo(tmp_path, num_replicates=2), tmp_path)
    assert "too few runs for an interval" in few.text
    assert "95 % interval, given" not in few.text


def test_a_condition_that_changes_the_workload_says_so(tmp_path: Path) -> None:
    conditions = [
        {"name": "base-waits", "factors": {"N": 6}},
        {"name": "more", "factors": {"N": 12}, "workload": {"num_sessions": 12}},
    ]
    asked = {"experiment": {"name": "demo", "base_seed": 1, "workload": {"num_sessions": 6}, "condition": conditions}}
    shapes = [Shape(), Shape(condition="more", num_sessions=12)]
    runs = [seal_run(tmp_path, shape) for shape in shapes]
    told = [
        replace(run, manifest=run.manifest.model_copy(update={"requested": {**run.manifest.requested, **asked}}))
        for run in runs
    ]
    page = report(told, tmp_path)
    assert "workload.num_sessions 6 \u2192 12" in page.text
    assert "N=12" in page.text


def test_a_title_that_reorders_its_letters_is_spelled_out(tmp_path: Path) -> None:
    title = f"8 slots {RIGHT_TO_LEFT}win"
    runs = seal_demo(tmp_path, num_replicates=1)
    page = written(runs, tmp_path / "page.html", title=title).read_text(encoding="utf-8")
    assert RIGHT_TO_LEFT not in page
    assert "8 slots \\u202ewin" in page
    screen = io.StringIO()
    Console(file=screen, width=80).print(to_rich(Table(title, "", ("a",), ()), 80))
    assert screen.getvalue().startswith("8 slots \\u202ewin\n")


def test_a_page_may_run_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    html = written(seal_demo(tmp_path, num_replicates=1), tmp_path / "page.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;")
    assert html.index(policy) < html.index("<title>")
