"""The scheduler, KV pools and cost model of the served stack, as its source has them.

No I/O but reading cost files, no clock, no arrivals, no sockets.
"""

from __future__ import annotations

from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel, load_cost_model
from harness.model.engine.scheduler import DECODE, IDLE, MIXED, PREFILL, Admission, KvEvent, Scheduler, Step, warm_up
