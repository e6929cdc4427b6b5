"""The page of an archive in a real browser: nothing to find for axe, nothing wider than a phone, light and dark."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.support.browser import chromium, violations


def test_axe_finds_nothing_and_no_screen_is_too_narrow(with_invalid: Path, tmp_path: Path) -> None:
    page_file = tmp_path / "index.html"
    with zipfile.ZipFile(with_invalid) as packed:
        page_file.write_bytes(packed.read("index.html"))
    with chromium() as browser:
        for width in (390, 1200):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
                page = context.new_page()
                said: list[str] = []
                page.on("console", lambda message, said=said: said.append(message.text))
                page.goto(page_file.as_uri())
                assert violations(page) == []
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
                assert page.eval_on_selector_all("pre", cut) == 0, "a command is read without scrolling"
                assert said == []
                context.close()
