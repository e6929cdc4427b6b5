"""Pages of the site as tests read them: their names, fenced blocks and prose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT

DOCS = ROOT / "docs"
START = ("install", "first-experiment", "reading-a-report")
GUIDES = tuple(f"guides/{page.stem}" for page in sorted((DOCS / "guides").glob("*.md")))
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. marks: what comments directly above it say, by their first words.

    tested_with: options that tests give to commands of the block beside their own, by the words that these begin with.
    """

    language: str
    text: str
    marks: dict[str, str]
    tested_with: dict[str, str]

    @property
    def commands(self) -> list[str]:
        """Commands of a console block; a line that begins with > continues the command above."""
        joined = re.sub(r"^> ", "\x00", self.text, flags=re.MULTILINE).replace("\n\x00", "\n")
        return [command.strip() for command in re.split(r"^\$ ", joined, flags=re.MULTILINE) if command.strip()]


def page_text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    blocks: list[Block] = []
    for comments, language, content in FENCE.findall(text):
        marks = dict(found := re.findall(r"<!-- ([a-z ]+): (.*) -->", comments))
        more = [text.partition(" --") for name, text in found if name == "tested with"]
        blocks.append(Block(language, content, marks, {words: f"--{options}" for words, _, options in more}))
    return blocks


def all_pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def lines_that_the_review_guide_lacks(printed: str) -> list[str]:
    """Lines of ``harness prereg check`` of one decision that the guide's table lacks, or has further up.

    A cell has the words that lines begin with, or end with after a colon; what is indented belongs to the line above.
    """
    table = page_text("guides/review").partition("| lines | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \| ", table, re.MULTILINE)
    rows = [re.findall(r"`(.+?)(?: \.\.\.)?`", cell) for cell in cells]
    row, lacking = 0, list[str]()
    for line in printed.splitlines():
        fitting = (place for place in range(row, len(rows)) if any(_fits(words, line) for words in rows[place]))
        if (found := next(fitting, None)) is not None:
            row = found
        elif not line.startswith(" "):
            lacking.append(line)
    return lacking


def _fits(words: str, line: str) -> bool:
    return line.endswith(words) if words.startswith(":") else line.startswith(words)
