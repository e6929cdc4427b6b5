"""One self-audit stands for those before all runs of this process, each of which takes a process and a second.

``tests/measure/client/test_self_audit.py`` tries the audit itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness.runner.run
from harness.clock import ScaledClock
from harness.measure.client.self_audit import self_audit
from harness.model.plan.model import Plan
from harness.model.spec import ClientSpec

_kept: dict[str, dict[str, Any]] = {}


def audited_once(plan: Plan, options: ClientSpec, clock: ScaledClock, records: Path | None = None) -> dict[str, Any]:
    """As ``self_audit``; of each client, all figures but the instant are those of its first audit here."""
    name = options.model_dump_json()
    if name not in _kept:
        _kept[name] = self_audit(plan, options, clock, records)
    return {**_kept[name], "at_ns": clock.now_ns()}


def audit_once() -> None:
    """From now on runs of this process have such an audit."""
    harness.runner.run.self_audit = audited_once
