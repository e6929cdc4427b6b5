"""The golden log in each of the vendor's formats, for every test that does not care which."""

from __future__ import annotations

import pytest

from tests.support.analysis_tables import GOLDEN


@pytest.fixture(params=["default", "precise"])
def golden_log(request: pytest.FixtureRequest) -> bytes:
    return (GOLDEN / f"{request.param}.log").read_bytes()
