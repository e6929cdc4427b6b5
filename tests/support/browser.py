"""Pages in a real browser, the system's Chromium. Playwright is loaded at first use, not by every worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. A machine that has none skips the test."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory(dir="/tmp") as home:
        # Playwright's driver does not start for a user without a home, nor Chromium where its socket has a long path.
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("HOME", home)
            variables.setenv("TMPDIR", home)
            started = sync_playwright().start()
        try:
            # Containers run as root, where Chromium's own sandbox cannot be made; the page is the test's own.
            browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
            yield browser
            browser.close()
        finally:
            started.stop()


def expect(part: Any) -> Any:
    """Playwright's assertions about ``part``, which wait until they hold."""
    from playwright.sync_api import expect as expect_of

    return expect_of(part)


def violations(page: Page) -> list[Any]:
    """What axe finds in the page against the rules of accessibility."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe().run(page).response["violations"]
