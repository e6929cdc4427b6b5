"""The installed twin as a fixture; where there is none, tests that need it say so and are skipped."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.twin.environment import TwinEnvironment, find_twin


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest) -> TwinEnvironment:
    """A twin of this checkout: the newest stable one, or that of the version which a test is parametrised with."""
    try:
        return find_twin(getattr(request, "param", None))
    except HarnessError as error:
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the twin bears its mark: ``-m twin`` are the tests that need the real stack."""
    for item in items:
        if isinstance(item, pytest.Function) and "twin" in item.fixturenames:
            item.add_marker("twin")
