"""The words of the harness with plain explanations: one file for reports, the terminal and the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from html import escape, unescape
from importlib.resources import files
from typing import NamedTuple

_ENTRY = re.compile(
    r'<dt id="([^"]*)" data-when="([^"]*)"(?: data-first="([^"]*)")? data-method="([^"]*)">(.*?)</dt>\s*<dd>(.*?)</dd>',
    re.DOTALL,
)
# A piece of a page that is left as it is, or text between tags.
_PIECE = re.compile(r"<(script|style|svg|a|button|summary|title|h[1-6]|th|code)\b.*?</\1>|<[^>]*>|[^<]+", re.DOTALL)
INTRODUCTION = (
    "Words of reports, tables and messages, each with the section of [the method](method.md) that defines\n"
    "it. The same in a terminal: `harness explain WORD`. `harness explain glossary\n"
    "-o docs/reference/glossary.md` writes this page.\n"
)


class GlossaryEntry(NamedTuple):
    """A word. when: texts whose presence on a page brings it in. first: where it is explained at its first place.

    section: of docs/reference/method*.md. term, meaning: HTML.
    """

    name: str
    when: tuple[str, ...]
    first: str
    section: str
    term: str
    meaning: str

    @property
    def plain_term(self) -> str:
        return _plain(self.term)

    @property
    def plain_meaning(self) -> str:
        return _plain(self.meaning)

    @property
    def words(self) -> list[str]:
        """What users may ask for."""
        return [word.strip() for word in self.plain_term.split(",")]


@lru_cache(maxsize=1)
def entries() -> tuple[GlossaryEntry, ...]:
    """Every entry, in the order of the file."""
    text = files("harness.present.report").joinpath("glossary.html").read_text(encoding="utf-8")
    return tuple(
        GlossaryEntry(name, tuple(when.split("|")), first, section, term, meaning)
        for name, when, first, section, term, meaning in _ENTRY.findall(text)
    )


def entries_of(word: str) -> list[GlossaryEntry]:
    """The entries that explain a word, as it is written before upper or lower case; [] where none does."""
    asked = word.casefold()
    exact = [entry for entry in entries() if word in (*entry.words, entry.plain_term)]
    whole = exact or [entry for entry in entries() if asked in map(str.casefold, (*entry.words, entry.plain_term))]
    return whole or [entry for entry in entries() if asked in re.findall(r"[^\W_]+", entry.plain_term.casefold())]


def with_first_places(page: str) -> str:
    """The page with each word explained, on hover and focus, where it first stands in a text."""
    waiting = {entry.first: entry for entry in entries() if entry.first}

    def explained(piece: re.Match[str]) -> str:
        text = piece[0]
        if text.startswith("<"):
            return text
        for word in re.findall("|".join(map(re.escape, waiting)) or "$^", text):
            if entry := waiting.pop(word, None):
                tip = escape(entry.plain_meaning)
                link = f'<a class="sym" href="#{entry.name}" data-tip="{tip}">{word}</a>'
                before, end, after = text.rpartition("</a>")
                text = before + end + after.replace(word, link, 1)
        return text

    return _PIECE.sub(explained, page)


def definitions(page: str) -> str:
    """The entries whose words the page uses, as a list of definitions."""
    text = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    used = [
        f'<dt id="{entry.name}">{entry.term}</dt>'
        f'<dd>{entry.meaning} <span class="dim">Method: “{entry.section}”.</span></dd>'
        for entry in entries()
        if f'href="#{entry.name}"' in page or any(word in text for word in entry.when)
    ]
    return f'<dl class="glossary">{"".join(used)}</dl>'


def markdown() -> str:
    """The glossary as a page of the documents."""
    return "\n".join(["# Words\n", INTRODUCTION, *_lines()])


def _lines() -> Iterator[str]:
    for entry in sorted(entries(), key=lambda entry: entry.plain_term.casefold()):
        yield f"## {entry.plain_term}"
        yield _wrapped(f"{entry.plain_meaning} Method: “{entry.section}”.") + "\n"


def _wrapped(text: str, width: int = 100) -> str:
    import textwrap

    return textwrap.fill(text.replace("*", "\\*").replace("|", "\\|"), width, break_long_words=False)


def _plain(html: str) -> str:
    """Text without tags; what is set low stands behind an underscore."""
    return unescape(" ".join(re.sub(r"<[^>]*>", "", re.sub(r"<sub>", "_", html)).split()))
