"""The one table of what the harness rests on in the vendor's sources, and what each release that was read has there.

``facts.json`` holds per fact: file, functions (or strings), what rests on it, and a digest per release. A new release
begins here. Nothing is judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import SpecError
from harness.stack.rbln.patches.check import Read
from harness.stack.rbln.releases.sources import (
    LINE_CHARS,
    RBLN,
    VLLM,
    Sources,
    Statement,
    digest_of,
    function_statements,
    strings,
)

USES = ("rules", "patch", "observer", "log grammar", "metrics", "launch")
"""What rests on facts: scheduler rules, the added log line, step records, log lines, counters, flags and variables."""
_FILE = "facts.json"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Known(_Row):
    """What stood in some releases. digest: "" for nothing at all. marks: LINE_CHARS per statement, to align a diff."""

    releases: tuple[str, ...] = Field(min_length=1)
    digest: str
    marks: str = ""


class Fact(_Row):
    """One thing in one file. Either functions, or formats (strings that start so), or names (strings, exactly).

    mentioning: of the functions only statements with one of these words, for constructors that set much else up.
    bears: what rests on it (``USES``). says: what is taken for granted there, in a sentence.
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
        """Whose release numbers ``known`` speaks of."""
        return RBLN if self.file.startswith(f"{RBLN}/") else VLLM

    def seen_in(self, read: Read) -> list[Statement]:
        """What stands in a release's file; nothing when the file or all of its functions are gone."""
        source = read(self.file)
        if source is None:
            return []
        try:
            if self.functions:
                found = function_statements(source, self.functions, with_logging=self.with_logging)
                words = self.mentioning
                return [one for one in found if any(word in one.text for word in words)] if words else found
            texts = sorted(set(strings(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SpecError(f"is no Python that this interpreter reads ({error})", where=self.file) from error
        chosen = [one for one in texts if (one in self.names if self.names else one.startswith(self.formats))]
        return [Statement(one, repr(one)) for one in chosen]

    def known_of(self, release: str) -> Known | None:
        """What was recorded of a release."""
        return next((one for one in self.known if release in one.releases), None)


class Table(_Row):
    """releases: vllm-rbln releases that were read, oldest first, with the vLLM that each is pinned to."""

    releases: dict[str, str]
    facts: tuple[Fact, ...]

    def release_of(self, fact: Fact, version: str) -> str:
        """The release number under which ``fact`` is recorded for vllm-rbln ``version``; "" when it is not read."""
        return version if fact.package == RBLN and version in self.releases else self.releases.get(version, "")


def load_table(path: Path | None = None) -> tuple[Path, Table]:
    """Where the table lies, and the table: this harness's own or another file; SpecError says what is wrong with it."""
    place = path or Path(str(resources.files("harness.stack.rbln.releases") / _FILE))
    try:
        return place, Table.model_validate_json(place.read_bytes())
    except OSError as error:
        raise SpecError(
            f"cannot be read ({error.strerror})", where=str(place), hint="Install the harness anew"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(
            f"is no table of facts: {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(place)
        ) from error


def recorded(table: Table, rbln: Sources, vllm: Sources | None) -> Table:
    """The table with the release in ``rbln`` added, and its vLLM where given; what it said of them is replaced."""
    found = {RBLN: rbln} | ({} if vllm is None else {VLLM: vllm})
    facts = [
        fact.model_copy(update={"known": _with(fact, source.version, fact.seen_in(source.read))})
        if (source := found.get(fact.package)) is not None
        else fact
        for fact in table.facts
    ]
    pin = vllm.version if vllm is not None else rbln.vllm_pin
    return Table(releases={**table.releases, rbln.version: pin}, facts=tuple(facts))


def _with(fact: Fact, release: str, statements: Sequence[Statement]) -> tuple[Known, ...]:
    digest = digest_of(statements)
    others = [
        one.model_copy(update={"releases": kept})
        for one in fact.known
        if (kept := tuple(name for name in one.releases if name != release))
    ]
    for at, one in enumerate(others):
        if one.digest == digest:
            others[at] = one.model_copy(update={"releases": (*one.releases, release)})
            return tuple(others)
    return (*others, Known(releases=(release,), digest=digest, marks="".join(one.mark for one in statements)))


def write_table(table: Table, path: Path) -> None:
    """Write the table, one fact after the other, so that a release is a small change; whole or not at all."""
    content: dict[str, Any] = table.model_dump(mode="json", exclude_defaults=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SpecError(f"cannot be written ({error.strerror})", where=str(path), hint="Give --table FILE") from error


def marks_of(known: Known) -> list[str]:
    """The mark of each statement that was recorded."""
    return [known.marks[at : at + LINE_CHARS] for at in range(0, len(known.marks), LINE_CHARS)]
