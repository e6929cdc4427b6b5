"""What stood still during a run: the client's machine, the client, the server. Each beyond its limit makes it INVALID.

Definitions: docs/method.md, "A run and its invariants".
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.records import Finding, Manifest
from harness.spec import LimitsSpec


def check_freezes(manifest: Manifest) -> Iterator[Finding]:
    """What the machine did to the client: stalls that touched a request, receives that waited for it, a lost meter.

    Runs without a client on this machine (simulated ones, and those recorded before it was noted) say nothing of it.
    """
    limits = LimitsSpec.model_validate(manifest.requested.get("limits", {}))
    audit = manifest.client_audit
    stall_ms, lag_ms = audit.get("touching_stall_max_ms"), audit.get("stamp_lag_max_ms")
    if audit.get("is_stall_meter_complete") is False:
        yield Finding(
            code="stall-meter-lost",
            severity="invalid" if limits.needs_stall_meter else "warning",
            evidence="the stall meter ended before the run did: whether the host stalled is not known",
            hint="Something ended that process; limits.needs_stall_meter = false keeps such runs, and says so",
        )
    if stall_ms is not None and stall_ms > limits.stall_ms:
        yield invalid(
            "host-stalled",
            f"the host stood still for {stall_ms:.0f} ms (wall) while requests were due or under way, "
            f"the limit is {limits.stall_ms:g} ms",
            "Run on an idler machine, or raise limits.stall_ms and say so",
        )
    if lag_ms is not None and lag_ms > limits.stamp_lag_ms:
        yield invalid(
            "client-stalled",
            f"what had arrived waited up to {lag_ms:.0f} ms (wall) for the client, "
            f"the limit is {limits.stamp_lag_ms:g} ms",
            "Run on an idler machine, or raise limits.stamp_lag_ms and say so",
        )


def invalid(code: str, evidence: str, hint: str = "") -> Finding:
    """A finding that makes a run INVALID."""
    return Finding(code=code, severity="invalid", evidence=evidence, hint=hint)
