"""The result of a gate for people and for CI: a table, a Markdown summary, JUnit XML. Nothing is judged here."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from harness.analysis.figures import cells, same
from harness.errors import escape_controls
from harness.judge.decisions.gate import FIGURES, MANY, GateResult, GateTest, GateVerdict
from harness.table import Table, four_digits, interval_text, markdown_rows, table_of

ANSWERS = {
    GateVerdict.PASS: "pass: every figure is shown to stay within its limit",
    GateVerdict.WORSE: "worse: a figure is shown to lie above its limit",
    GateVerdict.CANNOT_TELL: "cannot tell: a figure is shown neither to stay within its limit nor to lie above it",
}
# Columns of the table for programs, and where in a test each is.
COLUMNS = {
    **same("condition", "figure", "unit"),
    "pairs": "num_pairs",
    **same("looks", "baseline", "new", "ratio", "low", "high", "limit"),
    "verdict": "verdict.value",
    **same("why", "more_blocks"),
}


def gate_table(result: GateResult) -> Table:
    """A row for each figure of each condition, as programs read it."""
    alpha = result.policy.alpha
    # Figures whose ratio is the other way round.
    names = dict.fromkeys(test.figure for test in result.tests if not test.measure.is_lower_better)
    turned = f" ({', '.join(names)}: baseline over new)" if names else ""
    caption = (
        f"ratio: new over baseline{turned}, above 1 is worse, over pairs of runs of the same plan; interval: "
        "the limits that decide. Pass: its upper end lies below the limit; with a ratio at the limit that comes with "
        f"probability {alpha:g} at most. Worse: its lower end lies above the limit; of all figures together that comes "
        f"by chance with probability {alpha:g} at most. Both hold over all looks at these runs (looks: how many there "
        "were), for ratios that are nearly symmetric: a long tail makes false passes several times as frequent."
    )
    rows = (cells(test, COLUMNS) for test in result.tests)
    return table_of(f"Gate of {result.experiment}", caption, rows, result.origin)


def gate_lines(result: GateResult) -> list[str]:
    """The lines below that table: what was not passed, then what a reader must know."""
    return [*filter(None, [result.origin]), *_open_tests(result), *(f"note: {note}" for note in notes_of(result))]


def notes_of(result: GateResult) -> list[str]:
    """What a reader must know of the sides, and of figures that tables of single conditions make otherwise."""
    names = dict.fromkeys(test.figure for test in result.tests if test.measure.quantile is not None)
    means = (
        f"{name}: the mean over runs of each run's own percentile, not the percentile of all requests that `harness "
        "table` shows"
        for name in names
    )
    return [*means, *result.notes]


def shown_table(result: GateResult) -> Table:
    """The table as people read it, under the answer."""
    columns = ("condition", "figure", "pairs", "baseline", "new", "ratio", "interval", "limit", "verdict")
    rows = (
        (
            test.condition,
            f"{test.figure} [{test.unit}]",
            str(test.num_pairs),
            *("-" if value is None else four_digits(value) for value in (test.baseline, test.new)),
            "-" if test.ratio is None else f"{test.ratio:.4f}",
            "-" if test.low is None or test.high is None else interval_text(test.low, test.high),
            f"{test.limit:g}",
            test.verdict.value,
        )
        for test in result.tests
    )
    return Table(headline(result), "", columns, tuple(rows))


def headline(result: GateResult) -> str:
    """The answer in a sentence."""
    return f"gate {result.experiment}: {ANSWERS[result.verdict]}"


def terminal_tables(result: GateResult) -> list[Table]:
    """The same for a terminal: a table for each condition, narrow enough for 80 columns."""
    columns = ("figure", "pairs", "baseline", "new", "ratio", "interval", "limit", "verdict")
    rows_of: dict[str, list[tuple[str, ...]]] = {}
    for row in shown_table(result).records():
        shown = {**row, "interval": str(row["interval"]).replace(" to ", "\u2013")}
        rows_of.setdefault(str(row["condition"]), []).append(tuple(str(shown[name]) for name in columns))
    return [Table(condition, "", columns, tuple(rows)) for condition, rows in rows_of.items()]


def gate_markdown(result: GateResult) -> str:
    """A summary for the page of a CI job."""
    shown = shown_table(result)
    bold = [(*row[:-1], row[-1] if row[-1] == GateVerdict.PASS.value else f"**{row[-1]}**") for row in shown.rows]
    meanings = [f"{name}: {FIGURES[name].meaning}" for name in result.policy.limits]
    lines = [
        f"## Gate of {result.experiment}: {result.verdict.value}",
        "",
        f"{ANSWERS[result.verdict]}. {result.origin}".strip(),
        "",
        markdown_rows(shown.columns, bold),
        "",
        *(f"- {line}" for line in _open_tests(result)),
        *(f"- {note}" for note in notes_of(result)),
        "",
        gate_table(result).caption,
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
        "tests": gate_table(result).records(),
        "notes": notes_of(result),
    }
    return json.dumps(content, indent=1) + "\n"


def gate_junit(result: GateResult) -> str:
    """JUnit XML: a suite a condition, a case a figure; "worse" is a failure, "cannot tell" an error."""
    root = ElementTree.Element("testsuites", name=f"gate of {result.experiment}")
    for condition in dict.fromkeys(test.condition for test in result.tests):
        tests = [test for test in result.tests if test.condition == condition]
        suite = ElementTree.SubElement(root, "testsuite", name=condition, tests=str(len(tests)))
        suite.set("failures", str(sum(test.verdict is GateVerdict.WORSE for test in tests)))
        suite.set("errors", str(sum(test.verdict is GateVerdict.CANNOT_TELL for test in tests)))
        properties = ElementTree.SubElement(suite, "properties")
        facts = [("origin", result.origin), *(("note", note) for note in notes_of(result))]
        for name, value in facts:
            ElementTree.SubElement(properties, "property", name=name, value=value)
        for test in tests:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{result.experiment}.{condition}", name=test.figure
            )
            if test.verdict is GateVerdict.PASS:
                ElementTree.SubElement(case, "system-out").text = f"{_measured(test)}. {result.origin}".strip()
            else:
                tag = "failure" if test.verdict is GateVerdict.WORSE else "error"
                ElementTree.SubElement(case, tag, type=test.verdict.value, message=_reason(test)).text = result.origin
    ElementTree.indent(root)
    # XML has no place for control characters.
    return escape_controls(ElementTree.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"


def _open_tests(result: GateResult) -> list[str]:
    """A line for each figure that did not pass."""
    failed = [test for test in result.tests if test.verdict is not GateVerdict.PASS]
    return [f"{test.condition}, {test.figure}: {test.verdict.value}; {_reason(test)}" for test in failed]


def _reason(test: GateTest) -> str:
    measured = _measured(test)
    return "; ".join(filter(None, (measured, test.why, _missing(test))))


def _measured(test: GateTest) -> str:
    if test.ratio is None or test.low is None or test.high is None:
        return ""
    values = " -> ".join("-" if value is None else four_digits(value) for value in (test.baseline, test.new))
    ratio = f"ratio {test.ratio:.4f} ({interval_text(test.low, test.high)})"
    return f"{values} {test.unit}, {ratio}, limit {test.limit:g}, {test.num_pairs} pairs"


def _missing(test: GateTest) -> str:
    """How many more blocks would tell, should ratio and spread stay."""
    if test.verdict is not GateVerdict.CANNOT_TELL or not test.num_pairs:
        return ""
    if test.more_blocks is None:
        return f"no number of blocks up to {MANY:,} tells, should ratio and spread stay"
    plural = "s" * (test.more_blocks != 1)
    blocks = f"{test.more_blocks} more block{plural}"
    return f"about {blocks} would tell (--resume, on both sides), should ratio and spread stay"
