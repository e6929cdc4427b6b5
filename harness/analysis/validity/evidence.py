"""What the checks of one run look at: its manifest, requests, derived tables, plan and costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.logs.replicas import ServerTables, who_served
from harness.analysis.run_tables import RequestKey, request_keys
from harness.measure.records.manifest import Manifest

if TYPE_CHECKING:
    from harness.analysis.logs.parse import Derived
    from harness.model.engine import CostModel
    from harness.model.plan.model import Plan


@dataclass(frozen=True)
class Evidence:
    """One run, or one of its replicas.

    requests: REQUESTS schema. derived: of the same run. plan: what was to be sent; without it, the planned columns of
    ``requests`` and the manifest's own counts stand for it. cost_model: prices channel A where a limit asks for it.
    """

    manifest: Manifest
    requests: pa.Table
    derived: Derived
    plan: Plan | None = None
    cost_model: CostModel | None = None

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """``request_keys`` of the requests."""
        return request_keys(self.requests)

    @cached_property
    def servers(self) -> list[ServerTables]:
        """The server, or each replica whose log the run has."""
        parts = self.derived.parts or (self.derived,)
        return [ServerTables(part.tables["steps"], part.tables["kv_events"], part.step_log) for part in parts]

    @cached_property
    def served(self) -> dict[RequestKey, int]:
        """Which replica answered each request; empty where one server answered all."""
        metrics = self.derived.tables["metrics"]
        return who_served(self.requests, self.servers, self.derived.in_headers, metrics, len(self.servers))
