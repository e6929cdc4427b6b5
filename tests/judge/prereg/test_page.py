"""The page of an archive in a real browser: nothing to find for axe, nothing wider than a phone, light and dark."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright


def test_axe_finds_nothing_and_no_screen_is_too_narrow(with_invalid: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    page_file = tmp_path / "index.html"
    with zipfile.ZipFile(with_invalid) as packed:
        page_file.write_bytes(packed.read("index.html"))
    with sync_playwright() as started:
        # Containers run as root, where Chromium's own sandbox cannot be made; the page is this test's own.
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (390, 1200):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
                page = context.new_page()
                said: list[str] = []
                page.on("console", lambda message, said=said: said.append(message.text))
                page.goto(page_file.as_uri())
                assert Axe().run(page).response["violations"] == []
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
                assert page.eval_on_selector_all("pre", cut) == 0, "a command is read without scrolling"
                assert said == []
                context.close()
        browser.close()
