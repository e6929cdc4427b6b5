"""Facts that the harness relies on in the vendor's sources, which hold in a release, and what may be used there.

``facts.json`` holds per fact: file, functions (or strings), what relies on it, and a digest per release that was read.
Scheduler rules need one release, read before, with exactly the same facts. Log lines, metrics and flags of all releases
are read side by side, so each fact may be that of any release. Nothing is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import SpecError
from harness.outputs import whole_file
from harness.stacks.rbln.launch.patches import fitting_patch, why_no_observer
from harness.stacks.rbln.launch.sources import (
    LINE_CHARS,
    RBLN,
    VLLM,
    Read,
    Release,
    Sources,
    Statement,
    digest_of,
    function_statements,
    strings,
)
from harness.stacks.rbln.rules.kv_rules import RuleSet, rules_for_version, rules_for_vllm

USES = {RBLN: ("rules", "patch", "observer", "log grammar", "metrics", "launch"), VLLM: ("rules", "step log", "launch")}
"""What relies on facts: scheduler rules, the added log line, step records, log lines, counters, launch settings."""
FACTS = {RBLN: Path(__file__).with_name("facts.json"), VLLM: Path(__file__).parents[2] / "vllm" / "facts.json"}


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Known(_Row):
    """A fact's state in some releases. digest: "" when missing. marks: LINE_CHARS per statement, to align a diff."""

    releases: tuple[str, ...] = Field(min_length=1)
    digest: str
    marks: str = ""


class Fact(_Row):
    """Functions of a file, or formats (strings with this start), or names (exact strings).

    mentioning: keeps only statements of the functions that contain a given word, for long constructors. affects: the
    uses that rely on the fact (of ``USES``). says: the assumption, as a sentence.
    """

    name: str
    file: str
    functions: tuple[str, ...] = ()
    mentioning: tuple[str, ...] = ()
    formats: str = ""
    names: tuple[str, ...] = ()
    with_logging: bool = False
    affects: tuple[str, ...] = Field(min_length=1)
    says: str
    known: tuple[Known, ...] = ()

    @model_validator(mode="after")
    def _is_one_kind(self) -> Fact:
        uses = dict.fromkeys(use for uses in USES.values() for use in uses)
        if sum(map(bool, (self.functions, self.formats, self.names))) != 1 or not set(self.affects) <= set(uses):
            raise ValueError(f"{self.name}: give functions, formats or names, and affects of {', '.join(uses)}")
        return self

    @property
    def package(self) -> str:
        """The package whose release numbers ``known`` uses."""
        return RBLN if self.file.startswith(f"{RBLN}/") else VLLM

    def seen_in(self, read: Read) -> list[Statement]:
        """The fact's statements in a release; none when the file or all functions are missing."""
        source = read(self.file)
        if source is None:
            return []
        try:
            if self.functions:
                statements = function_statements(source, self.functions, with_logging=self.with_logging)
                words = self.mentioning
                return (
                    [item for item in statements if any(word in item.text for word in words)] if words else statements
                )
            texts = sorted(set(strings(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SpecError(f"is not Python that this interpreter can parse ({error})", where=self.file) from error
        chosen = [text for text in texts if (text in self.names if self.names else text.startswith(self.formats))]
        return [Statement(text, repr(text)) for text in chosen]

    def known_of(self, release: str) -> Known | None:
        """The record of a release."""
        return next((known for known in self.known if release in known.releases), None)


class FactTable(_Row):
    """releases: releases of ``package`` that were read, oldest first, with the vLLM that each pins, or itself is."""

    package: Literal["vllm_rbln", "vllm"] = RBLN
    releases: dict[str, str]
    facts: tuple[Fact, ...]

    def release_of(self, fact: Fact, version: str) -> str:
        """The release number under which ``fact`` is recorded for ``version`` of the package; "" when not read."""
        return version if fact.package == RBLN and version in self.releases else self.releases.get(version, "")

    def rules_for(self, version: str) -> RuleSet | None:
        """The rules of a version of the package, by the version alone."""
        return rules_for_version(version) if self.package == RBLN else rules_for_vllm(version)


def load_table(path: Path | None = None, package: str = RBLN) -> tuple[Path, FactTable]:
    """Path and content of a package's table: the shipped file, or ``path``; SpecError says what is wrong with it."""
    place = path or FACTS[package]
    with SpecError.on_os_error("cannot be read", where=place, hint="Install the harness again"):
        content = place.read_bytes()
    try:
        table = FactTable.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(
            f"is not a table of facts: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(place)
        ) from error
    if table.package != package:
        raise SpecError(
            f"holds facts of {table.package}, and the release is a {package}",
            where=str(place),
            hint="Leave --table out",
        )
    return place, table


def recorded(table: FactTable, release: Release) -> FactTable:
    """The table with ``release`` added, and its vLLM where its sources are at hand. Earlier records are replaced."""
    sources = {release.named.package: release.named} | ({} if release.vllm is None else {VLLM: release.vllm})
    facts = [
        fact.model_copy(update={"known": _with(fact, source.version, fact.seen_in(source.read))})
        if (source := sources.get(fact.package)) is not None
        else fact
        for fact in table.facts
    ]
    releases = {**table.releases, release.named.version: release.vllm_version}
    return table.model_copy(update={"releases": releases, "facts": tuple(facts)})


def _with(fact: Fact, release: str, statements: Sequence[Statement]) -> tuple[Known, ...]:
    digest = digest_of(statements)
    others = [
        known.model_copy(update={"releases": kept})
        for known in fact.known
        if (kept := tuple(name for name in known.releases if name != release))
    ]
    for place, known in enumerate(others):
        if known.digest == digest:
            others[place] = known.model_copy(update={"releases": (*known.releases, release)})
            return tuple(others)
    return (
        *others,
        Known(releases=(release,), digest=digest, marks="".join(statement.mark for statement in statements)),
    )


def write_table(table: FactTable, path: Path) -> None:
    """Write the table atomically, facts in order, so that a new release is a small diff."""
    content: dict[str, Any] = table.model_dump(mode="json", exclude_defaults=True)
    with SpecError.on_os_error("cannot be written", where=path, hint="Give --table FILE"), whole_file(path) as file:
        file.write(f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode())


def marks_of(known: Known) -> list[str]:
    """The mark of each recorded statement."""
    return [known.marks[at : at + LINE_CHARS] for at in range(0, len(known.marks), LINE_CHARS)]


MAX_DIFF_LINES = 8
MAX_SHOWN_CHARS = 110
SHOWN_BEFORE_CHANGE = 20
State = Literal["holds", "changed", "unseen"]
Verdict = Literal["yes", "no", "unknown"]
Find = Callable[[str, str], "Sources | None"]


@dataclass(frozen=True, slots=True)
class FactCheck:
    """One fact in the release. known_in: releases where it is the same. diff: against the release compared with.

    is_lacking: a recorded part is missing; false where a list of names only grew.
    """

    fact: Fact
    state: State
    known_in: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()
    is_lacking: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """Whether ``what`` of ``USES`` may be used, and why."""

    what: str
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """The result. compared_with: the nearest release among those read, or the requested release.

    rules: those that a server of this release follows; None where nobody has read what decides there.
    """

    package: str
    version: str
    vllm_version: str
    vllm_source: Literal["read", "recorded", "not found"]
    compared_with: str
    facts: tuple[FactCheck, ...]
    uses: tuple[Use, ...]
    rules: RuleSet | None

    @property
    def holds(self) -> bool:
        """Whether all uses are confirmed."""
        return all(use.verdict == "yes" for use in self.uses)

    @property
    def changed(self) -> tuple[FactCheck, ...]:
        return tuple(check for check in self.facts if check.state != "holds")


def check_release(
    table: FactTable,
    release: Release,
    *,
    against: str = "",
    find: Find = lambda _package, _version: None,
    on_fact: Callable[[str], None] = lambda _name: None,
) -> ReleaseCheck:
    """Compare a release with what is recorded.

    against: compare with this release alone, as if no other had been read; default: all of them. find: sources of
    a release by package and version, so that a diff can show removed statements. When the vLLM of ``release`` was not
    found, the records of the vLLM version that it pins are used. on_fact: receives the name of each fact when checked.
    """
    seen: dict[str, list[Statement]] = {}
    digests: dict[str, str | None] = {}
    for fact in table.facts:
        source = release.named if fact.package == RBLN else release.vllm
        if source is not None:
            seen[fact.name] = fact.seen_in(source.read)
            digests[fact.name] = digest_of(seen[fact.name])
        else:
            known = fact.known_of(release.vllm_version)
            digests[fact.name] = None if known is None else known.digest
        on_fact(fact.name)
    releases = (against,) if against else tuple(table.releases)
    if not releases:
        raise SpecError("the table of facts records no release", hint="`harness stack record WHEEL` records one")
    comparison = _Comparison(table, digests, releases)
    version = release.named.version
    nearest = min(reversed(releases), key=lambda name: (len(comparison.changed(table.facts, name)), name != version))
    reference = {
        package: find(package, number) for package, number in ((RBLN, nearest), (VLLM, table.releases[nearest]))
    }
    checks = [comparison.check(fact, seen.get(fact.name, []), nearest, reference[fact.package]) for fact in table.facts]
    is_recorded = any(fact.package == VLLM and digests[fact.name] is not None for fact in table.facts)
    return ReleaseCheck(
        package=release.named.package,
        version=version,
        vllm_version=release.vllm_version,
        vllm_source="read" if release.vllm is not None else "recorded" if is_recorded else "not found",
        compared_with=nearest,
        facts=tuple(checks),
        uses=tuple(comparison.use(what, checks, release.named) for what in USES[table.package]),
        rules=comparison.rules(table.facts)[0],
    )


def usable_with(site_packages: Path) -> str:
    """One line: what may be used with the release installed there, and what may not, with the reason."""
    try:
        uses = _check_installed(site_packages).uses
    except SpecError as error:
        return str(error)
    usable = ", ".join(use.what for use in uses if use.verdict == "yes")
    refused = "".join(f"; {use.what}: {use.verdict} ({use.why})" for use in uses if use.verdict != "yes")
    return f"usable: {usable or 'nothing'}{refused}"


def rules_installed(site_packages: Path) -> RuleSet | None:
    """The rules of the vllm-rbln installed there, as ``harness stack check`` says them; None where it says unknown.

    By its sources, not by its version: a pre-release may decide as the release before it.
    """
    try:
        return _check_installed(site_packages).rules
    except SpecError:
        return None


@cache
def _check_installed(site_packages: Path) -> ReleaseCheck:
    return check_release(load_table()[1], Release.of(site_packages))


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A release held to the table. digests: what it has, by fact; None where not read. releases: compared with."""

    table: FactTable
    digests: Mapping[str, str | None]
    releases: tuple[str, ...]

    def changed(self, facts: Sequence[Fact], release: str) -> list[Fact]:
        """The facts that differ from ``release``, or were not read."""
        return [
            fact
            for fact in facts
            if (known := self._known(fact, release)) is None or known.digest != self.digests[fact.name]
        ]

    def _known(self, fact: Fact, release: str) -> Known | None:
        return fact.known_of(self.table.release_of(fact, release))

    def check(self, fact: Fact, statements: Sequence[Statement], nearest: str, source: Sources | None) -> FactCheck:
        """One fact. nearest: the release of the diff; source: its sources, None when not at hand."""
        digest = self.digests[fact.name]
        if digest is None:
            return FactCheck(fact, "unseen")
        numbers = {self.table.release_of(fact, release) for release in self.releases}
        same = next((known for known in fact.known if known.digest == digest), None)
        known_in = () if same is None else tuple(release for release in same.releases if release in numbers)
        before = self._known(fact, nearest)
        if before is not None and before.digest == digest:
            return FactCheck(fact, "holds", known_in)
        old = fact.seen_in(source.read) if source is not None else None
        marks = {statement.mark for statement in statements}
        has_grown = bool(fact.names) and before is not None and set(marks_of(before)) <= marks
        return FactCheck(fact, "changed", known_in, _diff(before, old, statements), not has_grown)

    def use(self, what: str, checks: Sequence[FactCheck], rbln: Sources) -> Use:
        """Whether ``what`` of ``USES`` may be used."""
        concerned = [check for check in checks if what in check.fact.affects]
        changed = [check.fact.name for check in concerned if check.is_lacking and not check.known_in]
        unseen = sum(check.state == "unseen" for check in concerned)
        if what == "rules":
            return self._rules(concerned)
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
            return Use(what, "unknown", f"{unseen} facts in vLLM were not read")
        return Use(what, "yes", f"{len(concerned)} facts as in releases that were read")

    def rules(self, facts: Sequence[Fact]) -> tuple[RuleSet | None, str]:
        """The rules of the newest release with the same facts about them, and that release; None, "" for none."""
        deciding = [fact for fact in facts if "rules" in fact.affects]
        same = [release for release in reversed(self.releases) if not self.changed(deciding, release)]
        known = ((rules, release) for release in same if (rules := self.table.rules_for(release)) is not None)
        return next(known, (None, same[0] if same else ""))

    def _rules(self, concerned: Sequence[FactCheck]) -> Use:
        facts = [check.fact for check in concerned]
        rules, release = self.rules(facts)
        if rules is not None:
            return Use("rules", "yes", f"{rules.name}: {len(facts)} facts as in {release}")
        if release:
            return Use("rules", "unknown", f"as in {release}, whose rules are not among this harness's")
        if any(check.state == "unseen" for check in concerned):
            return Use("rules", "unknown", "the vLLM it is pinned to was neither found nor recorded")
        named = ", ".join(check.fact.name for check in concerned if check.state == "changed")
        return Use("rules", "unknown", f"read and drive them first (docs/guides/releases.md); changed: {named}")


def _diff(before: Known | None, old: Sequence[Statement] | None, new: Sequence[Statement]) -> tuple[str, ...]:
    """Lines with + for added and - for removed statements; without the old source, only the number removed is known."""
    if before is None:
        return ("no record of it",)
    if not new:
        return ("- all of it was removed",)
    if not before.digest:
        return (f"+ {_shown(new[0].text)}", f"  ... all of it is new, {len(new)} statement(s)")
    old_marks = [statement.mark for statement in old] if old is not None else marks_of(before)
    matcher = SequenceMatcher(None, old_marks, [statement.mark for statement in new], autojunk=False)
    lines: list[str] = []
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        texts = (statement.text for statement in reversed(new[: new_start + 1]))
        heads = (text for text in texts if text.startswith(("def ", "class ")))
        owner = f"@ {next(heads, '').partition('(')[0]}"
        if owner != "@ " and owner not in lines:
            lines.append(owner)
        removed = [statement.text for statement in old[start:end]] if old is not None else []
        added = [statement.text for statement in new[new_start:new_end]]
        same = _same_start(removed[0], added[0]) if len(removed) == len(added) == 1 else 0
        lines += [f"- {_shown(text, same)}" for text in removed]
        if old is None and end > start:
            lines.append(f"- {end - start} statement(s)")
        lines += [f"+ {_shown(text, same)}" for text in added]
    if len(lines) > MAX_DIFF_LINES:
        lines = [*lines[:MAX_DIFF_LINES], f"  ... and {len(lines) - MAX_DIFF_LINES} more lines"]
    return tuple(lines)


def _same_start(first: str, second: str) -> int:
    """Length of the shared start of two long statements, so that a shortened line still shows the difference."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return max(0, same - SHOWN_BEFORE_CHANGE) if max(len(first), len(second)) > MAX_SHOWN_CHARS else 0


def _shown(text: str, start: int = 0) -> str:
    text = f"...{text[start:]}" if start else text
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
