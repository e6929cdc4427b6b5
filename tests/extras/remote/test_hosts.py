"""A fleet at a Dask scheduler: whoever is killed, each run arrives once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.errors import SpecError
from harness.model.spec import FleetSpec
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

AT = {"devices": [0], "hosts": ["alpha"]}


def test_a_scheduler_is_on_loopback_or_has_tls_or_is_said_to_be_open():
    assert FleetSpec.model_validate({**AT, "scheduler": "tls://head:8786"})
    assert FleetSpec.model_validate({**AT, "scheduler": "tcp://127.0.0.1:8786"}).is_on_loopback
    assert FleetSpec.model_validate({**AT, "scheduler": "tcp://head:8786", "open_port": True})
    for refused in ("tcp://head:8786", "head:8786", "http://head:1"):
        with pytest.raises(ValidationError):
            FleetSpec.model_validate({**AT, "scheduler": refused})
    done = harness("fleet", "worker", "tcp://head:8786", "--device", "0")
    assert done.returncode == 2
    assert "--open-port" in done.stderr


@pytest.mark.live
@pytest.mark.same_everywhere
def test_a_scheduler_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.extras.remote.hosts.CONNECT_TIMEOUT_S", 1.0)
    spec = small_experiment(fleet={**AT, "scheduler": "tcp://127.0.0.1:1"})
    with pytest.raises(SpecError, match="no scheduler answers"):
        run_experiment(spec, runs_root=tmp_path)
