"""Tables for papers: the same cells in LaTeX, every sign escaped; nothing is computed or rounded."""

from __future__ import annotations

from collections.abc import Sequence

_SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "&": r"\&",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u2264": r"$\le$",
    "\u00d7": r"$\times$",
    "\u03c4": r"$\tau$",
    "\u2020": r"\dag{}",
    "\u2013": "--",
}
_PAIRS = {"->": r"$\rightarrow$", "<=": r"$\le$"}


def to_latex(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], label: str = ""
) -> str:
    """A booktabs table as in the paper; needs \\usepackage{booktabs}."""
    lines = [r"\begin{table*}[!t]", rf"\caption{{{latex_text(caption)}}}", *([rf"\label{{{label}}}"] if label else [])]
    if rows:
        lines += [
            r"\centering\small",
            rf"\begin{{tabular}}{{l{'c' * (len(columns) - 1)}}}",
            r"\toprule",
            _ampersands(columns),
            r"\midrule",
            *map(_ampersands, rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    lines += [rf"\par\footnotesize {latex_text(note)}" for note in notes]
    return "\n".join([*lines, r"\end{table*}", ""])


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(latex_text(cell) for cell in cells) + r" \\"


def latex_text(words: str) -> str:
    """Escaped; a number's minus and arrows in math."""
    escaped = "".join(_SIGNS.get(letter, letter) for letter in words)
    for plain, math in _PAIRS.items():
        escaped = escaped.replace(plain, math)
    is_negative = escaped.startswith("-") and escaped[1:2].isdigit()
    return f"$-${escaped[1:]}" if is_negative else escaped
