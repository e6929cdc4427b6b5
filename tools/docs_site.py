"""Pages of the site that are made when it is built: commands, keys, Python names, and the notebook with its outputs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

import harness
from harness.cli import explain
from harness.cli.tree import app

NOTEBOOK = "notebook.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages; mkdocs calls this before it reads the folder's own."""
    pages = {
        "reference/commands.md": commands_page(),
        "reference/keys.md": keys_page(),
        "notebook.md": notebook_page(Path(config.docs_dir) / NOTEBOOK),
    }
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to the notebook lead to its page of the site; the page on Python ends with every public name."""
    more = python_names() if page.file.src_uri == "reference/python.md" else ""
    return markdown.replace(f"{NOTEBOOK})", "notebook.md)") + more


def notebook_page(path: Path) -> str:
    """The cells of a notebook with the outputs that are stored in it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(block for cell in cells for block in _blocks_of_cell(cell)) + "\n"


def _blocks_of_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output["data"]
        if "image/png" in shown:
            yield f"![The plot that this cell draws](data:image/png;base64,{''.join(shown['image/png']).strip()})"
        elif "text/html" in shown:
            yield "".join(shown["text/html"])
        else:
            yield f"```text\n{''.join(shown['text/plain'])}\n```"


def commands_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(app)
    return get_docs_for_click(obj=root, ctx=typer.Context(root), name="harness", title="Commands")


def keys_page() -> str:
    """What ``harness explain`` prints, topic by topic."""
    parts = ["# Keys of an experiment file", "What `harness explain TOPIC` prints."]
    for topic in [name for name in explain._topics() if name != "tables"]:
        out = io.StringIO()
        with redirect_stdout(out):
            explain.explain([topic])
        parts.append(f"## {topic}\n\n```toml\n{out.getvalue().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def python_names() -> str:
    """The names that ``import harness`` offers."""
    return "".join(f"\n\n::: {home}.{name}" for name, home in sorted(harness._HOME.items())) + "\n"
