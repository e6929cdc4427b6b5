"""Logs of agents as test data: their form, counts, ids and times, and no text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# Words, ids, numbers and stamps; a path, a sentence and a command are none.
PLAIN = re.compile(r"[\w.:+@$#-]{0,80}")
LEFT_OUT = "left out: {} characters"


def without_texts(value: Any) -> Any:
    """The value with every text replaced by its length, unless it is one word."""
    if isinstance(value, dict):
        return {_text(key): without_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_texts(inner) for inner in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    if PLAIN.fullmatch(text):
        return text
    return LEFT_OUT.format(len(text))


def write_without_texts(source: Path, target: Path) -> None:
    """A log of JSON lines, or of one document, without texts."""
    text = source.read_text()
    lines = [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else [json.loads(text)]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(without_texts(line)) + "\n" for line in lines))
