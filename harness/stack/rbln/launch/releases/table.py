"""The table of facts that the harness relies on in the vendor's sources, and their state in each release read so far.

``facts.json`` holds per fact: file, functions (or strings), what relies on it, and a digest per release. Nothing is
judged here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import SpecError
from harness.outputs import whole_file
from harness.stack.rbln.launch.releases.sources import (
    LINE_CHARS,
    RBLN,
    VLLM,
    Read,
    Release,
    Statement,
    digest_of,
    function_statements,
    strings,
)

USES = ("rules", "patch", "observer", "log grammar", "metrics", "launch")
"""What relies on facts: scheduler rules, the added log line, step records, log lines, counters, launch settings."""
_FILE = "facts.json"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Known(_Row):
    """A fact's state in some releases. digest: "" when missing. marks: LINE_CHARS per statement, to align a diff."""

    releases: tuple[str, ...] = Field(min_length=1)
    digest: str
    marks: str = ""


class Fact(_Row):
    """Functions of a file, or formats (strings with this start), or names (exact strings).

    mentioning: keeps only statements of the functions that contain a given word, for long constructors. bears: what
    relies on the fact (of ``USES``). says: the assumption, as a sentence.
    """

    name: str
    file: str
    functions: tuple[str, ...] = ()
    mentioning: tuple[str, ...] = ()
    formats: str = ""
    names: tuple[str, ...] = ()
    with_logging: bool = False
    bears: tuple[str, ...] = Field(min_length=1)
    says: str
    known: tuple[Known, ...] = ()

    @model_validator(mode="after")
    def _is_one_kind(self) -> Fact:
        if sum(map(bool, (self.functions, self.formats, self.names))) != 1 or not set(self.bears) <= set(USES):
            raise ValueError(f"{self.name}: give functions, formats or names, and bears of {', '.join(USES)}")
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


class Table(_Row):
    """releases: vllm-rbln releases that were read, oldest first, with the vLLM that each pins."""

    releases: dict[str, str]
    facts: tuple[Fact, ...]

    def release_of(self, fact: Fact, version: str) -> str:
        """The release number under which ``fact`` is recorded for vllm-rbln ``version``; "" when not read."""
        return version if fact.package == RBLN and version in self.releases else self.releases.get(version, "")


def load_table(path: Path | None = None) -> tuple[Path, Table]:
    """Path and content of the table: the shipped file, or ``path``; SpecError says what is wrong with it."""
    place = path or Path(str(resources.files("harness.stack.rbln.launch.releases") / _FILE))
    try:
        return place, Table.model_validate_json(place.read_bytes())
    except OSError as error:
        raise SpecError(
            f"cannot be read ({error.strerror})", where=str(place), hint="Install the harness again"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(
            f"is not a table of facts: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(place)
        ) from error


def recorded(table: Table, release: Release) -> Table:
    """The table with ``release`` added, and its vLLM where its sources are at hand. Earlier records are replaced."""
    sources = {RBLN: release.rbln} | ({} if release.vllm is None else {VLLM: release.vllm})
    facts = [
        fact.model_copy(update={"known": _with(fact, source.version, fact.seen_in(source.read))})
        if (source := sources.get(fact.package)) is not None
        else fact
        for fact in table.facts
    ]
    return Table(releases={**table.releases, release.rbln.version: release.vllm_version}, facts=tuple(facts))


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


def write_table(table: Table, path: Path) -> None:
    """Write the table atomically, facts in order, so that a new release is a small diff."""
    content: dict[str, Any] = table.model_dump(mode="json", exclude_defaults=True)
    with SpecError.on_os_error("cannot be written", where=path, hint="Give --table FILE"), whole_file(path) as file:
        file.write(f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode())


def marks_of(known: Known) -> list[str]:
    """The mark of each recorded statement."""
    return [known.marks[at : at + LINE_CHARS] for at in range(0, len(known.marks), LINE_CHARS)]
