"""What the core asks for by the name "replicas"."""

from __future__ import annotations

from harness.extras.replicas.launch import launch_replicas
from harness.extras.replicas.predicted import DrawsOnReplicas
from harness.extras.replicas.simulated import RecordedReplicas
from harness.runner.backends.base import Replicas

REPLICAS = Replicas(launch=launch_replicas, simulated=RecordedReplicas, drawn=DrawsOnReplicas)
