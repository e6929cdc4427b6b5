"""The installed twin as a fixture; where there is none, tests that need it say so and are skipped."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.twin.environment import TwinEnvironment, find_twin


@pytest.fixture(scope="session")
def twin() -> TwinEnvironment:
    """The twin of this checkout."""
    try:
        return find_twin()
    except HarnessError as error:
        pytest.skip(str(error))
