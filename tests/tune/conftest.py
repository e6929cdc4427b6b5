"""Tunes whose pages have no pictures, which cost most; only the tests of the page look at them."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_pictures(request: pytest.FixtureRequest) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in () if request.node.name.endswith("test_page.py") else ("_frontier", "_cost_and_ttft"):
            patch.setattr(f"harness.tune.page.{name}", _nothing)
        yield


def _nothing(*_drawn: object) -> str:
    return ""
