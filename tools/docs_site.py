"""Pages of the site that the program writes itself: its commands, the keys of an experiment file, its Python names."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import harness
from harness.cli import explain
from harness.cli.tree import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages; mkdocs calls this before it reads the folder's own."""
    pages = {"commands": commands_page(), "keys": keys_page(), "python": python_page()}
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


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
            explain.explain(topic)
        parts.append(f"## {topic}\n\n```toml\n{out.getvalue().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """The names that ``import harness`` offers."""
    names = [f"::: {home}.{name}" for name, home in harness._HOME.items()]
    return "\n\n".join(["# Python", *names]) + "\n"
