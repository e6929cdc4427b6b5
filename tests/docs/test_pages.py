"""Pages are short, their sentences too, lines wrap, and every page, link and picture of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from harness.cli.tree import app
from harness.model.spec import load_toml
from tests.docs.pages import DOCS, FENCE, GUIDES, START, all_pages, blocks_of, page_text
from tests.support.checkout import ROOT

MOST_WORDS = 1_600
MOST_WORDS_IN_A_SENTENCE = 30
WIDTH = 100
LONGER_FOR_A_REASON = {
    "guides/traces.md": "every format with what it does not promise, and where recordings of each are",
    "reference/findings.md": "every refusal and finding, written from their table",
    "reference/data-dictionary.md": "every column of the records, held to their schema",
    "reference/method.md": "every cost with its formula",
    "reference/method-comparisons.md": "every answer, interval and rule with its formula",
    "reference/method-planning.md": "every prediction and number of blocks with its formula",
    "reference/method-sessions.md": "every latency and figure of reuse with its formula",
    "evidence/client-timing.md": "measurements with the command of each, most of it tables",
    "evidence/error-rates.md": "measurements with the command of each, most of it tables",
}
READ_FIRST = ["README.md", "docs/README.md", *(f"docs/{name}.md" for name in (*START, *GUIDES))]


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_read_in_seven_minutes_or_has_a_reason(page: Path) -> None:
    num_words = len(FENCE.sub("", page.read_text(encoding="utf-8")).split())
    assert (num_words > MOST_WORDS) == (str(page.relative_to(DOCS)) in LONGER_FOR_A_REASON)


def sentences_of(text: str) -> list[str]:
    """Sentences of a page's prose; code, links' targets and tables are no prose, a piece of code is a word."""
    prose = FENCE.sub("\n\n", text)
    prose = re.sub(r"<!--.*?-->|<picture>.*?</picture>", "", prose, flags=re.DOTALL)
    prose = re.sub(r"^(?:\||#).*$", "\n", prose, flags=re.MULTILINE)
    prose = re.sub(r"`[^`]+`", "code", prose)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    paragraphs = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.|>) ", prose, flags=re.MULTILINE)
    return [
        " ".join(sentence.split())
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?])[\s*]+(?=[\"*\[(A-Z]|code)", paragraph)
        if sentence.strip()
    ]


@pytest.mark.parametrize("name", READ_FIRST)
def test_sentences_of_what_is_read_first_are_short(name: str) -> None:
    sentences = sentences_of((ROOT / name).read_text(encoding="utf-8"))
    assert [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS_IN_A_SENTENCE] == []


@pytest.mark.parametrize("name", READ_FIRST)
def test_lines_of_what_is_read_first_wrap(name: str) -> None:
    prose = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    lines = [line for line in prose.splitlines() if not line.startswith("|") and "](" not in line]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_every_document_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    everywhere = [str(page.relative_to(DOCS)) for page in all_pages()]
    assert [page for page in everywhere if page not in navigation] == []


def test_the_search_of_the_site_takes_no_file_from_the_network() -> None:
    # The offline plug-in names a script of the network, unless one with this name is there.
    named = re.search(r"polyfills: \[(.*iframe-worker.*)\]", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert (DOCS / named[1]).is_file()


def test_the_first_page_has_one_link_for_each_of_three_readers_and_one_for_all_others() -> None:
    assert len(re.findall(r"\]\(", page_text("README"))) == 4


@pytest.mark.parametrize("page", [ROOT / "README.md", *all_pages()], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_of_a_page_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    places = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text)
    named = [place for pair in places for place in pair if place and "://" not in place]
    assert [place for place in named if not (page.parent / place).exists()] == []


def test_the_readme_says_it_in_500_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"<picture>.*?</picture>", "", FENCE.sub("", readme.partition("## Further")[0]), flags=re.DOTALL)
    assert len(prose.split()) <= 500


def test_the_first_page_and_the_readme_lead_three_readers() -> None:
    for text in (page_text("README"), (ROOT / "README.md").read_text(encoding="utf-8")):
        assert all(reader in text for reader in ("I have an NPU", "I run vLLM", "I review a paper"))


def test_the_readmes_path_to_an_npu_is_that_of_the_guide() -> None:
    """Each of its commands stands in the guide, in the same order."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## On your NPU server")[2]
    short = blocks_of(section.partition("\n## ")[0])[0].commands
    typed = [
        command.partition("  #")[0].rstrip()
        for block in blocks_of(page_text("guides/npu"))
        for command in block.commands
    ]
    assert [command for command in typed if command in short] == short


def test_packages_and_extras_that_the_install_page_names_are_there() -> None:
    extras = load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", page_text("install"))) <= set(extras)


def test_no_page_names_a_command_that_is_not_there() -> None:
    """A name may be folded over two lines."""
    commands = typer.main.get_command(app).commands
    unknown: list[tuple[str, str]] = []
    for page in [ROOT / "README.md", *all_pages()]:
        text = " ".join(page.read_text(encoding="utf-8").split())
        for name, inner in re.findall(r"`harness ([a-z]+)(?: ([a-z]+)\b)?", text):
            below = getattr(commands.get(name), "commands", None)
            if name not in commands or (below and inner and inner not in below):
                unknown.append((page.name, f"{name} {inner}"))
    assert unknown == []
