"""The shell of every HTML page that the harness writes: style, what a page may do, title. One file, no network."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from html import escape
from importlib.resources import files

from harness.errors import escape_controls


@lru_cache
def style() -> str:
    """The style sheet of all pages: light and dark, screens and paper."""
    return files("harness.html").joinpath("style.css").read_text(encoding="utf-8")


def content_security_policy(script: str = "") -> str:
    """What a page may do: show what is in it and run this one script; it loads nothing and sends nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def plain_page(title: str, main: str, answer: str = "") -> str:
    """A page without a script: a title, and below it ``main`` as HTML. answer: HTML above the title."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{content_security_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style>"
    )
    body = f"<header>{answer}<h1>{escape(title)}</h1></header><main>{main}</main>"
    return escape_controls(f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n')
