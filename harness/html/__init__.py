"""HTML pages: the shell of each, with its style and what it may do, and the parts that a page is a list of.

A part is HTML as text; what it shows is escaped in it. One file, no network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
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


def page(title: str, parts: Iterable[str], answer: str = "") -> str:
    """A page without a script: its title, and the parts below it. answer: parts above the title."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{content_security_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style>"
    )
    body = f"<header>{answer}<h1>{escape(title)}</h1></header><main>{''.join(parts)}</main>"
    return escape_controls(f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n')


def section(title: str, *parts: str) -> str:
    """Parts below a heading of their own."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def text(words: str, kind: str = "") -> str:
    """A paragraph. kind: its class in the style sheet, such as "banner", "dim" or "caption"; "" without words."""
    return f"<p{_class(kind)}>{escape(words)}</p>" if words else ""


def listing(lines: Iterable[str], tag: str = "ul", kind: str = "") -> str:
    """A line each; "" where there is none. tag: "ol" numbers them."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<{tag}{_class(kind)}>{items}</{tag}>" if items else ""


def pairs(entries: Iterable[Sequence[str]]) -> str:
    """Names, each with what is said of it."""
    return f"<dl>{''.join(f'<dt>{escape(entry[0])}</dt><dd>{escape(entry[-1])}</dd>' for entry in entries)}</dl>"


def rows_table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], num_words: int = 100) -> str:
    """A table that scrolls. The first column names its row; columns after the first ``num_words`` are of numbers."""
    kinds = [_class("num" * (place >= num_words)) for place in range(len(heads))]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells, kinds[1:], strict=True))
        + "</tr>"
        for name, *cells in rows
    )
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def figure(picture: str, caption: str = "") -> str:
    """A picture, as SVG, above its caption."""
    return f"<figure>{picture}{f'<figcaption>{escape(caption)}</figcaption>' * bool(caption)}</figure>"


def code(lines: str) -> str:
    """Lines to copy, as they are."""
    return f'<pre tabindex="0">{escape(lines)}</pre>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
