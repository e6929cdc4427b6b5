"""The table of findings: severity, meaning and next move of each code. Evidence is written where it is found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from harness.measure.records.manifest import Finding, Severity
from harness.model.spec.base import load_toml
from harness.table import markdown_rows

BEFORE = """A refusal leaves nothing: no process, no run, no overlay in part, no socket in the common
temporary folder. Exit codes: 1 for the host (port, devices, environment, a server that does not
start), 2 for what was written."""
AFTER = """A finding says what a run, or an experiment, showed that a reader must know. `invalid` makes a run
INVALID: it is kept, and enters no comparison (exit code 3). `warning` is something to know,
`info` a note. The same in a terminal: `harness explain CODE`. `harness explain findings -o
docs/reference/findings.md` writes this page."""


class FindingRow(NamedTuple):
    """A row of the table. severities: the usual one first. see: more of it, below docs."""

    severities: tuple[Severity, ...]
    means: str
    do: str = ""
    see: str = ""


@lru_cache(maxsize=1)
def finding_rows() -> Mapping[str, FindingRow]:
    """Every finding by its code, in the order of findings.toml."""
    table: dict[str, dict[str, str]] = load_toml(Path(__file__).with_name("findings.toml"))
    rows: dict[str, FindingRow] = {}
    for code, row in table.items():
        severities = row["severity"].replace(" or ", ", ").split(", ")
        rows[code] = FindingRow(
            cast("tuple[Severity, ...]", tuple(severities)), row["means"], row.get("do", ""), row.get("see", "")
        )
    return rows


def finding(code: str, evidence: str, do: str | None = None, severity: Severity | None = None) -> Finding:
    """A finding of the table. do, severity: where the evidence decides them, in place of the row's."""
    row = finding_rows()[code]
    assert severity is None or severity in row.severities, f"findings.toml does not say that {code} may be {severity}"
    hint = row.do if do is None else do
    return Finding(code=code, severity=severity or row.severities[0], evidence=evidence, hint=hint)


def tolerated(code: str) -> str:
    """What of an answer is noted under ``tolerated-CODE``; the code itself where the table does not have it."""
    row = finding_rows().get(f"tolerated-{code}")
    return code if row is None else row.means


def findings_markdown() -> str:
    """The page of the documents: refusals, then findings."""
    refusals: list[dict[str, str]] = load_toml(Path(__file__).with_name("refusals.toml"))["refusal"]
    before = [(row["says"], row["means"], row["do"]) for row in refusals]
    after = [
        (f"`{code}`", " or ".join(row.severities), row.means, f"{row.do} [More](../{row.see})" if row.see else row.do)
        for code, row in finding_rows().items()
    ]
    return "\n".join(
        (
            *("# Refusals and findings of a server", "", "## Before anything starts", "", BEFORE, ""),
            markdown_rows(("it says", "it means", "do"), before),
            *("", "## During or after a run", "", AFTER, ""),
            markdown_rows(("code", "severity", "it means", "do"), after),
            "",
        )
    )
