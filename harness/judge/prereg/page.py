"""What an archive proves, for people: one self-contained HTML page, and the same in some twenty lines of text.

Nothing is judged here, and nothing is shown that is not in the archive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from harness.analysis.compare.drawn import DrawnCosts, predicted_ratio
from harness.analysis.stats import Interval
from harness.clock import NS_PER_S
from harness.html import code, listing, page, pairs, rows_table, section, text
from harness.judge.decisions.decide import Decision
from harness.judge.prereg.frozen import Preregistration
from harness.judge.prereg.judge import Judgement
from harness.model.sim.draws import if_assumed
from harness.model.spec.experiment import ConditionSpec
from harness.table import interval_text

# Lines of one kind that a terminal shows; the page has all.
MOST_LINES = 4
OUTCOME_CLASSES = {"PASS": "yes", "FAIL": "bad"}


def archive_page(
    frozen: Preregistration, judgement: Judgement, proven: Sequence[str], unproven: Sequence[str], made_by: str
) -> str:
    """The page as HTML. proven, unproven: claims; made_by: the harness that wrote it."""
    # A note is of somebody's work tree, and not in the archive.
    fates = (line for line in judgement.account_lines if line not in judgement.notes)
    parts = [
        text(judgement.origin, "banner"),
        section("Question", _question(frozen)),
        section("Verdict", _verdicts(judgement)),
        section("Runs", listing(fates, kind="break")),
        section("Criteria, as frozen", _criteria(frozen)),
        section("Predictions, as frozen", _predictions(frozen)),
        section("What is proven", listing(proven, kind="break")),
        section("What is not proven", listing(unproven, kind="break")),
        section("How to check", _how(made_by)),
    ]
    return page(f"{frozen.experiment.title or frozen.name}: a preregistered experiment", parts)


def archive_lines(frozen: Preregistration, proven: Sequence[str], unproven: Sequence[str]) -> Iterator[str]:
    """The lines below the decisions: question, criteria, predictions, what is proven and what is not."""
    yield f"question: {frozen.experiment.question or 'none was written down'}"
    criteria = [f"{rule.rule.name} ({rule.rule.kind})" for rule in frozen.rules]
    yield f"criteria: {', '.join(criteria) or 'the stopping rule'}, frozen at {frozen.frozen_at_utc[:16]}Z"
    yield from _shortened(f"predicted: {line}" for line in predictions_in_words(frozen))
    yield from (f"proven: {claim}" for claim in proven)
    yield from (f"not proven: {claim}" for claim in unproven)


def predictions_in_words(frozen: Preregistration) -> Iterator[str]:
    """A clause for each condition and its baseline: the predicted cost ratio, and its interval over the draws."""
    for name, baseline, ratio, interval, _ in _predicted(frozen):
        if baseline:
            level = "" if interval is None else f"{100 * interval.level:.0f} %"
            ends = "" if interval is None else f"{interval_text(interval.low, interval.high)}{_if_assumed(frozen)}"
            among = "" if interval is None else f" ({level}: {ends})"
            yield f"{name} costs {ratio:.4f} of {baseline}{among}"


def _if_assumed(frozen: Preregistration) -> str:
    return if_assumed(any(each.assumed for each in frozen.perturbations.values()))


def _predicted(frozen: Preregistration) -> Iterator[tuple[str, str, float, Interval | None, float]]:
    """(condition, its baseline or "", ratio, interval, summed device seconds) of every condition."""
    spec = frozen.experiment
    by_name = {name: [runs[k] for k in sorted(runs)] for name, runs in frozen.predictions.items()}
    for condition in spec.condition:
        own, baseline = by_name.get(condition.name, []), spec.baseline_of(condition)
        seconds = sum(run.device_ns for run in own) / NS_PER_S
        base = by_name.get(baseline, [])
        if not own:
            continue
        if baseline == condition.name or not base:
            yield condition.name, "", 1.0, None, seconds
        else:
            interval = DrawnCosts.of(own).interval_to(DrawnCosts.of(base))
            yield condition.name, baseline, predicted_ratio(own, base), interval, seconds


def _shortened(lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    yield from listed[:MOST_LINES]
    if len(listed) > MOST_LINES:
        yield f"  and {len(listed) - MOST_LINES} more, on the page"


def _question(frozen: Preregistration) -> str:
    spec = frozen.experiment
    settings = "".join(
        f"<li><b>{escape(condition.name)}</b>: {escape(settings_in_words(condition))}</li>"
        for condition in spec.condition
    )
    replayed = listing((each.sentence for each in frozen.replayed), kind="break")
    blocks = f"{spec.replicates} blocks, each with every condition once; backend {spec.backend}."
    return (
        text(spec.question or "No question was written down.")
        + text(f"Experiment {frozen.name}: {blocks}")
        + f'<ul class="break">{settings}</ul>'
        + (text("Replayed:") + replayed) * bool(replayed)
    )


def settings_in_words(condition: ConditionSpec) -> str:
    """What a condition changes: "kv slots 12; no-waits"."""
    # The dump is without secrets.
    table = condition.model_dump(mode="json", include={"server", "workload"})
    # A reader has no file of that name; what is replayed stands below.
    changed = [
        "another recording" if key == "trace" else f"{key.replace('_', ' ')} {_value(value)}"
        for part in table.values()
        for key, value in part.items()
    ]
    treated = [condition.treatment] if condition.treatment != "as-drawn" else []
    return "; ".join([*changed, *treated]) or "the settings of the experiment"


def _verdicts(judgement: Judgement) -> str:
    ratios = [ratio for decision in judgement.decisions if (ratio := _finite_ratio(decision)) is not None]
    ends = (min([1.0, *(ratio.low for ratio in ratios)]), max([1.0, *(ratio.high for ratio in ratios)]))
    return "".join(_verdict(judgement, decision, ends) for decision in judgement.decisions)


def _verdict(judgement: Judgement, decision: Decision, ends: tuple[float, float]) -> str:
    outcome = decision.outcome.value
    label = f" {escape(decision.label)}" if decision.label else ""
    blocks = escape(judgement.blocks_of(decision))
    return (
        f"{text(decision.answer)}{_picture(decision, ends)}"
        f'<p><b class="{OUTCOME_CLASSES.get(outcome, "dim")}">{outcome}</b>{label} '
        f"<code>{escape(decision.rule)}</code>: {escape(decision.subject)}{blocks}</p>"
        f"{text(decision.reason, 'caption break')}"
    )


def _finite_ratio(decision: Decision) -> Interval | None:
    ratio = decision.intervals.get("ratio")
    return ratio if ratio is not None and all(map(math.isfinite, (ratio.low, ratio.high))) else None


def _picture(decision: Decision, ends: tuple[float, float]) -> str:
    """The interval of a cost ratio beside the line of equal cost; "" where a decision has none.

    ends: of the axis, which all decisions of a page share.
    """
    ratio = _finite_ratio(decision)
    if ratio is None:
        return ""
    first, last = ends
    low, high, middle, same = (
        f"{4 + 92 * (value - first) / ((last - first) or 1.0):.2f}%"
        for value in (ratio.low, ratio.high, ratio.estimate, 1)
    )
    words = (
        f"cost ratio {ratio.estimate:.4f}, {100 * ratio.level:.0f} % interval {interval_text(ratio.low, ratio.high)}"
    )
    return (
        f'<svg width="100%" height="32" role="img" aria-label="{escape(words)}">'
        f'<line x1="{same}" x2="{same}" y1="0" y2="32" stroke="var(--ink)"/>'
        f'<line x1="{low}" x2="{high}" y1="16" y2="16" stroke="var(--c0)" stroke-width="3"/>'
        f'<circle cx="{middle}" cy="16" r="6" fill="var(--c0)"/></svg>'
        '<p class="caption">Dot and bar: cost against the baseline, with its interval; left is less. '
        "Upright line: the same cost. All bars of this page have one scale.</p>"
    )


def _criteria(frozen: Preregistration) -> str:
    parts: list[str] = []
    for entry in frozen.rules:
        table = entry.rule.model_dump(mode="json", exclude_none=True)
        asked = str(table.pop("question", ""))
        shown = [(name, _value(value)) for name, value in table.items() if value not in ("", [], {})]
        parts.append(f"<h3>{escape(entry.rule.name)}</h3><p>{escape(asked)}</p>{pairs(shown)}")
    if frozen.experiment.stop is not None:
        parts.append(f"<h3>Stopping rule</h3><p>{escape(str(frozen.experiment.stop))}</p>")
    return "".join(parts)


def _predictions(frozen: Preregistration) -> str:
    if not frozen.predictions:
        return "<p>Nothing was predicted: no costs of these servers are named (server.cost_model).</p>"
    rows = [
        (
            name,
            f"{seconds:.2f}",
            f"{ratio:.4f}" if baseline else "baseline",
            "" if interval is None else interval_text(interval.low, interval.high),
        )
        for name, baseline, ratio, interval, seconds in _predicted(frozen)
    ]
    heads = ("condition", "device time, s", "ratio to its baseline", "interval over draws")
    holds = f" An interval holds its share of outcomes{given}." if (given := _if_assumed(frozen)) else ""
    caption = f"Simulated before any run was made; sums over all frozen runs.{holds}"
    return rows_table("Predictions", heads, rows) + text(caption, "caption")


def _how(made_by: str) -> str:
    commands = (
        ("all of this page, judged again from the runs", "harness prereg check ."),
        ("each file as it was packed", "sha256sum --check SHA256SUMS"),
        ("the figures of its runs", "harness table ."),
    )
    lines = "\n".join(f"# {meaning}\n{command}" for meaning, command in commands)
    words = (
        "The verdict, this page and every claim on it follow from the files of the archive alone; no repository and "
        "no network is needed. Whether the archive is signed, and by whom, is said by the check. In the folder that "
        "the archive was unpacked into:"
    )
    return text(words) + code(lines) + text(f"Written by {made_by}.")


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):
        return "; ".join(f"{name} {_value(each)}" for name, each in value.items())
    return str(value)
