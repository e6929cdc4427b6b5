"""Which facts still hold in a release, which changed and how, and what may therefore be used there.

Rules need one release that was read whose facts all stand there unchanged; log lines, metrics and flags are read side
by side for all releases, so each may be that of any. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Literal

from harness.errors import SpecError
from harness.stack.rbln.kv_rules import rules_for_version
from harness.stack.rbln.patches.check import fitting_patch, why_no_observer
from harness.stack.rbln.releases.sources import RBLN, VLLM, Sources, Statement, digest_of, open_sources, vllm_beside
from harness.stack.rbln.releases.table import USES, Fact, Known, Table, load_table, marks_of

MAX_DIFF_LINES = 8
MAX_SHOWN_CHARS = 110
SHOWN_BEFORE_CHANGE = 20
State = Literal["holds", "changed", "unseen"]
Verdict = Literal["yes", "no", "unknown"]
Find = Callable[[str, str], "Sources | None"]


@dataclass(frozen=True, slots=True)
class FactCheck:
    """One fact in the release. known_in: releases where it stands exactly so. diff: against the release compared with.

    is_lacking: what is recorded is not all there; false where a list of names only grew.
    """

    fact: Fact
    state: State
    known_in: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()
    is_lacking: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """What may be used: ``what`` of ``USES``."""

    what: str
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """The answer. compared_with: the release that was read and is nearest, or the one asked for."""

    version: str
    vllm_version: str
    vllm_source: Literal["read", "recorded", "not found"]
    compared_with: str
    facts: tuple[FactCheck, ...]
    uses: tuple[Use, ...]

    @property
    def holds(self) -> bool:
        """Whether everything may be used."""
        return all(use.verdict == "yes" for use in self.uses)

    @property
    def changed(self) -> tuple[FactCheck, ...]:
        return tuple(one for one in self.facts if one.state != "holds")


def check_release(
    table: Table,
    rbln: Sources,
    vllm: Sources | None,
    *,
    against: str = "",
    find: Find = lambda _package, _version: None,
    on_fact: Callable[[str], None] = lambda _name: None,
) -> ReleaseCheck:
    """Compare the release in ``rbln`` (and its vLLM) with what is recorded.

    against: compare with this release alone, as if no other had been read; default: all of them. find: sources of
    a release by package and version, so that a diff can show what is gone. Without ``vllm``, what is recorded of
    the version that the release is pinned to counts. on_fact: told the name of each fact when it has been looked at.
    """
    pinned = vllm.version if vllm is not None else rbln.vllm_pin
    found: list[tuple[Fact, str | None, list[Statement]]] = []
    for fact in table.facts:
        source = rbln if fact.package == RBLN else vllm
        if source is not None:
            statements = fact.seen_in(source.read)
            found.append((fact, digest_of(statements), statements))
        else:
            known = fact.known_of(pinned)
            found.append((fact, None if known is None else known.digest, []))
        on_fact(fact.name)
    digests = {fact.name: digest for fact, digest, _ in found}
    releases = [against] if against else list(table.releases)
    if not releases:
        raise SpecError("the table of facts records no release", hint="`harness stack record WHEEL` records one")
    nearest = min(reversed(releases), key=lambda one: _distance(table, digests, one, rbln.version))
    reference = {
        package: find(package, number) for package, number in ((RBLN, nearest), (VLLM, table.releases[nearest]))
    }
    checks = [_fact_check(table, *one, nearest, releases, reference) for one in found]
    is_recorded = any(fact.package == VLLM and digests[fact.name] is not None for fact in table.facts)
    return ReleaseCheck(
        version=rbln.version,
        vllm_version=pinned,
        vllm_source="read" if vllm is not None else "recorded" if is_recorded else "not found",
        compared_with=nearest,
        facts=tuple(checks),
        uses=tuple(_use(what, table, checks, digests, releases, rbln) for what in USES),
    )


def usable_with(site_packages: Path) -> str:
    """What may be used with the release installed there, on one line; what may not is named with the reason."""
    try:
        rbln = open_sources(site_packages)
        uses = check_release(load_table()[1], rbln, vllm_beside(rbln)).uses
    except SpecError as error:
        return str(error)
    usable = ", ".join(use.what for use in uses if use.verdict == "yes")
    refused = "".join(f"; {use.what}: {use.verdict} ({use.why})" for use in uses if use.verdict != "yes")
    return f"usable: {usable or 'nothing'}{refused}"


def _distance(table: Table, digests: Mapping[str, str | None], release: str, version: str) -> tuple[int, bool]:
    return len(_changed(table.facts, table, digests, release)), release != version


def _changed(facts: Sequence[Fact], table: Table, digests: Mapping[str, str | None], release: str) -> list[Fact]:
    """The facts that are not as they were in ``release``, or were not looked at."""
    return [
        fact for fact in facts if (known := _known(table, fact, release)) is None or known.digest != digests[fact.name]
    ]


def _known(table: Table, fact: Fact, release: str) -> Known | None:
    return fact.known_of(table.release_of(fact, release))


def _fact_check(
    table: Table,
    fact: Fact,
    digest: str | None,
    statements: Sequence[Statement],
    nearest: str,
    releases: Sequence[str],
    reference: Mapping[str, Sources | None],
) -> FactCheck:
    if digest is None:
        return FactCheck(fact, "unseen")
    numbers = {table.release_of(fact, one) for one in releases}
    same = next((one for one in fact.known if one.digest == digest), None)
    known_in = () if same is None else tuple(one for one in same.releases if one in numbers)
    before = _known(table, fact, nearest)
    if before is not None and before.digest == digest:
        return FactCheck(fact, "holds", known_in)
    source = reference[fact.package]
    old = fact.seen_in(source.read) if source is not None else None
    has_grown = bool(fact.names) and before is not None and set(marks_of(before)) <= {one.mark for one in statements}
    return FactCheck(fact, "changed", known_in, _diff(before, old, statements), not has_grown)


def _diff(before: Known | None, old: Sequence[Statement] | None, new: Sequence[Statement]) -> tuple[str, ...]:
    """Lines with + for what came and - for what went; without the old source, only how much went is known."""
    if before is None:
        return ("nothing of it was recorded",)
    if not new:
        return ("- all of it is gone",)
    if not before.digest:
        return (f"+ {_shown(new[0].text)}", f"  ... all of it is new, {len(new)} statement(s)")
    old_marks = [one.mark for one in old] if old is not None else marks_of(before)
    matcher = SequenceMatcher(None, old_marks, [one.mark for one in new], autojunk=False)
    lines: list[str] = []
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        heads = (one.text for one in reversed(new[: new_start + 1]) if one.text.startswith(("def ", "class ")))
        owner = f"@ {next(heads, '').partition('(')[0]}"
        if owner != "@ " and owner not in lines:
            lines.append(owner)
        gone = [one.text for one in old[start:end]] if old is not None else []
        came = [one.text for one in new[new_start:new_end]]
        same = _same_start(gone[0], came[0]) if len(gone) == len(came) == 1 else 0
        lines += [f"- {_shown(text, same)}" for text in gone]
        if old is None and end > start:
            lines.append(f"- {end - start} statement(s)")
        lines += [f"+ {_shown(text, same)}" for text in came]
    if len(lines) > MAX_DIFF_LINES:
        lines = [*lines[:MAX_DIFF_LINES], f"  ... and {len(lines) - MAX_DIFF_LINES} more lines"]
    return tuple(lines)


def _same_start(one: str, other: str) -> int:
    """How many characters two statements share, when it takes that to see where they part."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return max(0, same - SHOWN_BEFORE_CHANGE) if max(len(one), len(other)) > MAX_SHOWN_CHARS else 0


def _shown(text: str, start: int = 0) -> str:
    text = f"...{text[start:]}" if start else text
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def _use(
    what: str,
    table: Table,
    checks: Sequence[FactCheck],
    digests: Mapping[str, str | None],
    releases: Sequence[str],
    rbln: Sources,
) -> Use:
    own = [one for one in checks if what in one.fact.bears]
    changed = [one.fact.name for one in own if one.is_lacking and not one.known_in]
    unseen = sum(one.state == "unseen" for one in own)
    if what == "rules":
        return _rules(table, own, digests, releases)
    if what == "patch":
        patch, why = fitting_patch(rbln.read)
        return Use(what, "no", why) if patch is None else Use(what, "yes", f"{patch.path.parent.name}/{patch.name}")
    if what == "observer":
        why = why_no_observer(rbln.read, rbln.version)
        again = f"; hold it to a device trace again, changed: {', '.join(changed)}" if changed else ""
        return Use(what, "no", why) if why else Use(what, "yes", f"its hooks fit{again}")
    if changed:
        return Use(what, "unknown", f"changed: {', '.join(changed)}")
    if unseen:
        return Use(what, "unknown", f"{unseen} facts in vLLM were not looked at")
    return Use(what, "yes", f"{len(own)} facts as in releases that were read")


def _rules(table: Table, own: Sequence[FactCheck], digests: Mapping[str, str | None], releases: Sequence[str]) -> Use:
    facts = [one.fact for one in own]
    same = [one for one in reversed(releases) if not _changed(facts, table, digests, one)]
    for release in same:
        if (rules := rules_for_version(release)) is not None:
            return Use("rules", "yes", f"{rules.name}: {len(facts)} facts as in {release}")
    if same:
        return Use("rules", "unknown", f"as in {same[0]}, whose rules are not among this harness's")
    if any(one.state == "unseen" for one in own):
        return Use("rules", "unknown", "the vLLM it is pinned to was neither found nor recorded")
    named = ", ".join(one.fact.name for one in own if one.state == "changed")
    return Use("rules", "unknown", f"read and drive them first (docs/releases.md); changed: {named}")
