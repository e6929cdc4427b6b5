"""The pictures of the README, made from a real run of the demo: its report and its live view, light and dark.

``python tools/pictures.py [FOLDER]``. Needs the system's Chromium (``CHROMIUM``, else /usr/bin/chromium).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

from harness.errors import ExitCode

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}
WIDTH_PX, HEIGHT_PX = 1000, 760
COLUMNS = 92
SECONDS_BETWEEN_LOOKS = 1.0
REPEATS = 5


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        live = run_demo(runs)
        for scheme in SCHEMES:
            (folder / f"live-{scheme}.svg").write_text(terminal_svg(live, THEMES[scheme]), encoding="utf-8")
        photograph(runs / "demo.html", folder)


def run_demo(runs: Path) -> str:
    """Performs the demo; what ``harness watch`` shows of its last run while requests are in flight, with colours."""
    harness = [sys.executable, "-m", "harness"]
    run = [*harness, "run", "demo", "--runs", str(runs)]
    demo = subprocess.Popen(run)
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    live, repeats = "", REPEATS
    while True:
        try:
            code = demo.wait(SECONDS_BETWEEN_LOOKS)
            if code == ExitCode.RUN_INVALID and repeats:
                # A busy machine makes runs INVALID.
                repeats -= 1
                demo = subprocess.Popen([*run, "--resume", "--retry-invalid"])
                continue
            if code:
                raise SystemExit("the demo failed")
            return live.replace(str(runs), "runs")
        except subprocess.TimeoutExpired:
            watch = [*harness, "watch", "--once", "--runs", str(runs)]
            view = subprocess.run(watch, env=environment, capture_output=True, text=True, check=False).stdout
            live = view if "in bucket" in view else live


def terminal_svg(shown: str, theme: TerminalTheme) -> str:
    """The terminal's text as a picture that fetches nothing."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi(shown.strip("\n")))
    svg = console.export_svg(title="harness watch", theme=theme)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def photograph(page: Path, folder: Path) -> None:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in SCHEMES:
            tab = chromium.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX}, color_scheme=scheme)
            tab.goto(page.resolve().as_uri())
            tab.screenshot(path=str(folder / f"report-{scheme}.png"))
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
