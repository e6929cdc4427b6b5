"""The limit of open files is raised or refused before anything is sent."""

from __future__ import annotations

import resource

import pytest

from harness.errors import SpecError
from harness.measure.client.connection import allow_sockets


def test_more_sessions_than_the_system_allows_files_is_refused_before_anything_is_sent() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit of open files")
    with pytest.raises(SpecError, match="open files"):
        allow_sockets(hard)
    allow_sockets(8)
