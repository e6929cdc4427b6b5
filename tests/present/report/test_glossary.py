"""One glossary: reports explain a word where it first stands, the terminal on request, and the page is its text."""

from __future__ import annotations

import re

import pytest

from harness.present.report.glossary import entries, entries_of, markdown, with_first_places
from tests.support.checkout import ROOT
from tests.support.command_line import harness


def test_the_page_of_the_documents_is_the_text_of_the_glossary() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    assert page == markdown(), "write it again: harness explain glossary -o docs/reference/glossary.md"
    assert all(len(line) <= 100 for line in page.splitlines())


def test_every_entry_names_a_section_of_the_method_and_explains_in_plain_text() -> None:
    pages = (ROOT / "docs" / "reference").glob("method*.md")
    sections = re.findall(r"^## (.+)$", "\n".join(page.read_text(encoding="utf-8") for page in pages), re.MULTILINE)
    for entry in entries():
        assert entry.section in sections, entry.name
        assert len(entry.plain_meaning) > 20
        assert not re.search(r"<[a-z/]|&[a-z]+;", entry.plain_meaning)
    assert len({entry.name for entry in entries()}) == len(entries())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("W", "Time that other sessions, ready to decode, waited while a prompt was computed"),
        ("evicted by dummy", "A request that the server adds to fill a compiled batch size"),
        ("plan draw", "One draw of each plan"),
        ("restart", "the same input on another start of the server"),
        ("equal", "The margin is the largest change that counts as none"),
        ("INVALID run", "broke an invariant"),
        ("sealed", "A run whose records are complete"),
    ],
)
def test_a_word_that_users_meet_is_explained(word: str, said: str) -> None:
    assert any(said in entry.plain_meaning for entry in entries_of(word))


def test_a_word_is_explained_once_where_it_first_stands_in_a_text() -> None:
    page = "<head><title>sealed</title></head><h2>sealed</h2><p>12 sealed runs, sealed</p><p>sealed</p>"
    found = with_first_places(page)
    assert found.count("data-tip=") == 1
    assert '<p>12 <a class="sym" href="#g-sealed" data-tip="A run whose records are complete.' in found
    assert re.sub(r"<a class=[^>]*>|</a>", "", found) == page
    both = with_first_places("<p>6 % cost model assumed exact: cheaper, one draw of each plan</p>")
    assert re.findall(r'">([^<]+)</a>', both) == ["cost model assumed exact", "one draw of each plan"]


def test_the_terminal_explains_words_keys_first() -> None:
    said = harness("explain", "Dummy").stdout
    assert "A request that the server adds to fill a compiled batch size" in said
    assert "(docs/reference/method*.md, Reuse)" in said
    assert harness("explain", "time", "in", "flight").stdout.startswith("channel B, B, time in flight"), "unquoted"
    assert harness("explain", "condition").stdout.startswith("[[condition]]")
    near = harness("explain", "re-arival")
    assert near.returncode == 2
    assert "Did you mean 're-arrival'?" in " ".join(near.stderr.split())
