"""The result of a gate for people and for CI: tables, a Markdown summary, JSON. Nothing is judged here."""

from __future__ import annotations

import json

from harness.analysis.figures import cells, same
from harness.analysis.stats import grouped
from harness.judge.decisions.gate import FIGURES, GateResult, GateTest, GateVerdict
from harness.judge.planning.power import MOST_BLOCKS
from harness.table import Table, TableForm, four_digits, interval_text, written

ANSWERS = {
    GateVerdict.PASS: "pass: every figure is shown to stay within its limit",
    GateVerdict.WORSE: "worse: a figure is shown to lie above its limit",
    GateVerdict.CANNOT_TELL: "cannot tell: a figure is shown neither to stay within its limit nor to lie above it",
}
# Columns of the table for programs, and where in a test each is.
COLUMNS = {
    **same("condition", "figure", "unit"),
    "pairs": "num_pairs",
    **same("baseline", "new", "ratio", "low", "high", "limit"),
    "verdict": "verdict.value",
    **same("why", "more_blocks"),
}


def _caption(result: GateResult) -> str:
    """What the columns and the verdicts mean."""
    alpha = result.policy.alpha
    # Figures whose ratio is the other way round.
    names = dict.fromkeys(test.figure for test in result.tests if not test.measure.is_lower_better)
    turned = f" ({', '.join(names)}: baseline over new)" if names else ""
    return (
        f"ratio: new over baseline{turned}, above 1 is worse, over pairs of runs of the same plan; interval: "
        "the limits that decide. Pass: its upper end lies below the limit; with a ratio at the limit that comes with "
        f"probability {alpha:g} at most. Worse: its lower end lies above the limit; of all figures together that comes "
        f"by chance with probability {alpha:g} at most. Both hold over all looks at these runs, if each was counted "
        f"(this one: --look {result.policy.look}), for ratios that are nearly symmetric: a long tail makes false "
        "passes several times as frequent."
    )


def gate_lines(result: GateResult) -> list[str]:
    """The lines below that table: what was not passed, then what a reader must know."""
    return [*filter(None, [result.origin]), *_open_tests(result), *(f"note: {note}" for note in result.notes)]


def headline(result: GateResult) -> str:
    """The answer in a sentence."""
    return f"gate {result.experiment}: {ANSWERS[result.verdict]}"


def shown_tables(result: GateResult) -> list[Table]:
    """A table for each condition as people read it, narrow enough for 80 columns."""
    columns = ("figure", "pairs", "baseline", "new", "ratio", "interval", "limit", "verdict")
    by_condition = grouped(result.tests, lambda test: test.condition)
    return [Table(name, "", columns, tuple(map(_row, tests))) for name, tests in by_condition.items()]


def _row(test: GateTest) -> tuple[str, ...]:
    return (
        f"{test.figure} [{test.unit}]",
        str(test.num_pairs),
        *("-" if value is None else four_digits(value) for value in (test.baseline, test.new)),
        "-" if test.ratio is None else f"{test.ratio:.4f}",
        "-" if test.low is None or test.high is None else interval_text(test.low, test.high, between="\u2013"),
        f"{test.limit:g}",
        test.verdict.value,
    )


def gate_markdown(result: GateResult) -> str:
    """A summary for the page of a CI job."""
    meanings = [f"{name}: {FIGURES[name].meaning}" for name in result.policy.limits]
    lines = [
        f"## Gate of {result.experiment}: {result.verdict.value}",
        "",
        f"{ANSWERS[result.verdict]}. {result.origin}".strip(),
        "",
        written(shown_tables(result), TableForm.markdown),
        *(f"- {line}" for line in _open_tests(result)),
        *(f"- {note}" for note in result.notes),
        "",
        _caption(result),
        f"Figures: {'; '.join(meanings)}.",
    ]
    return "\n".join(lines) + "\n"


def gate_json(result: GateResult) -> str:
    """Everything, for programs."""
    content = {
        "verdict": result.verdict.value,
        "experiment": result.experiment,
        "origin": result.origin,
        "alpha": result.policy.alpha,
        "look": result.policy.look,
        "tests": [cells(test, COLUMNS) for test in result.tests],
        "notes": list(result.notes),
    }
    return json.dumps(content, indent=1) + "\n"


def _open_tests(result: GateResult) -> list[str]:
    """A line for each figure that did not pass."""
    failed = [test for test in result.tests if test.verdict is not GateVerdict.PASS]
    reasons = [(_measured(test), test.why, _missing(test, result.policy.look)) for test in failed]
    return [
        f"{test.condition}, {test.figure}: {test.verdict.value}; {'; '.join(filter(None, parts))}"
        for test, parts in zip(failed, reasons, strict=True)
    ]


def _measured(test: GateTest) -> str:
    if test.ratio is None or test.low is None or test.high is None:
        return ""
    values = " -> ".join("-" if value is None else four_digits(value) for value in (test.baseline, test.new))
    ratio = f"ratio {test.ratio:.4f} ({interval_text(test.low, test.high)})"
    return f"{values} {test.unit}, {ratio}, limit {test.limit:g}, {test.num_pairs} pairs"


def _missing(test: GateTest, look: int) -> str:
    """How many more blocks would tell, should ratio and spread stay."""
    if test.verdict is not GateVerdict.CANNOT_TELL or not test.num_pairs:
        return ""
    if test.more_blocks is None:
        return f"no number of blocks up to {MOST_BLOCKS:,} tells, should ratio and spread stay"
    plural = "s" * (test.more_blocks != 1)
    blocks = f"{test.more_blocks} more block{plural}"
    return f"about {blocks} would tell (--resume on both sides, then --look {look + 1}), should ratio and spread stay"
