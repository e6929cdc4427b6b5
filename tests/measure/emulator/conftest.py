"""Emulator processes for tests that talk to them as a client would; none outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.emulator_process import Emulator, Start, end, start_ready


@pytest.fixture
def start_emulator(tmp_path: Path) -> Iterator[Start]:
    """Starts servers with any configuration; all are gone after the test."""
    started: list[Emulator] = []

    def start(*flags: str, **config: Any) -> Emulator:
        started.append(start_ready(tmp_path / str(len(started)), *flags, **config))
        return started[-1]

    yield start
    for emulator in started:
        end(emulator)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """One server of vllm-rbln 0.11.1 for all tests of a module that only talk to it; the others: ``test_dialect``."""
    shared = start_ready(tmp_path_factory.mktemp("emulator"), log_requests=True, server={"rules": "vendor-0.11.1"})
    yield shared
    end(shared)
