"""The golden log in each of the vendor's formats, and simulated runs, for tests that do not care which."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest

from harness.measure.records.run import SealedRun
from harness.runner import run_experiment
from tests.support.analysis_tables import GOLDEN
from tests.support.experiments import small_experiment

Simulated = Callable[..., tuple[SealedRun, ...]]


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Runs of the small experiment in virtual time, made once for the same changes, in a folder of their own."""

    @cache
    def made(changes: str) -> tuple[SealedRun, ...]:
        spec = small_experiment(**{"backend": "sim", "replicates": 3, **json.loads(changes)})
        return run_experiment(spec, runs_root=tmp_path_factory.mktemp("simulated")).runs

    return lambda **changes: made(json.dumps(changes, sort_keys=True))


@pytest.fixture(params=["default", "precise"])
def golden_log(request: pytest.FixtureRequest) -> bytes:
    return (GOLDEN / f"{request.param}.log").read_bytes()
