"""The folder of a run: the name of every file in it, and of the folder itself.

This is the only module that spells these names; writers and readers of a file share its constant.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.measure.records.schema import DERIVED_TABLES

# Written last; without it a folder is not a run.
MANIFEST = "manifest.json"
LOCK = "writer.lock"

# Inputs of the run: the plan, a copy of the cost-model file, the frozen file of a confirmatory run.
PLAN = "plan.jsonl"
# A copy, so that modelled device time (A) does not change with the checkout.
COST_MODEL = "cost_model.toml"
FROZEN = "preregistration.json"

# Raw, as bytes: the server's log, (offset, instant) of each read of it, scrapes, devices, the observer's records,
# the steps of a vLLM server. The simulator has no log and no scrapes, and the steps of paged rules alone.
SERVER_LOG = "server.log"
LOG_STAMPS = "server.log.stamps"
SCRAPES = "scrapes.jsonl"
DEVICES = "devices.jsonl"
DEVICE_METRICS = "device_metrics.jsonl"
DEVICE_TRACE = "device_trace.jsonl"
OBSERVER = "observer.jsonl"
STEP_LOG = "steps.jsonl"
# The same steps, stamped by the engine cores themselves.
CORE_STEPS = "core_steps.jsonl"
SSH_LOG = "ssh.log"
# Of several replicas behind a router: a folder for each, with the raw files of a server alone, and the router's own.
REPLICAS = "replicas"
ROUTER_LOG = "router.log"
ROUTER_LOG_STAMPS = "router.log.stamps"
ROUTER_CONFIG = "router.config"
ROUTED = "routed.jsonl"
# A line for each answer: the client's id of the request, and what the response's header says of who answered.
SERVED = "served.jsonl"
# The device of a fleet that makes the run. Other devices read it to know their neighbours.
FLEET = "fleet.json"

# Configuration that a server was started with.
SERVER_CONFIG = "server.config.json"
SERVER_LOGGING = "server.logging.json"
TWIN_SETTINGS = "twin.settings.json"
REMOTE = "remote.json"

DERIVED = "derived"

PARTIAL = ".partial"
ABORTED = ".aborted-"
# An INVALID run that was repeated: sealed as it was, beside the run that took its name.
RETRIED = ".retried-"
_RAW_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# ASCII digits without a leading zero: two names never mean the same replicate.
_REPLICATE = re.compile(r"0|[1-9][0-9]{0,8}")
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f\\\\\\ud800-\\udfff]")


def run_folder(root: Path, experiment: str, condition: str, replicate: int) -> Path:
    """Where a sealed run lies."""
    return Path(root) / experiment / condition / str(replicate)


def replica_folder(folder: Path, replica: int) -> Path:
    """Where the raw files of a replica lie, in the folder of a run."""
    return folder / REPLICAS / str(replica)


def replica_folders(folder: Path) -> list[Path]:
    """The folders of a run's replicas, in their order; none for a run of one server."""
    numbers = (path.name for path in (folder / REPLICAS).glob("*") if path.name.isdecimal())
    return [replica_folder(folder, number) for number in sorted(map(int, numbers))]


def table_path(name: str) -> str:
    """Path of a table within the run's folder: what can be rebuilt from raw files lies in ``derived``."""
    return f"{DERIVED}/{name}.parquet" if name in DERIVED_TABLES else f"{name}.parquet"


def step_reports(folder: Path) -> list[Path]:
    """Step statistics that a server writes, one file per rank (VLLM_RBLN_METRICS_DIR, from vllm-rbln 0.12.1 on)."""
    return sorted(folder.glob("metrics*.json"))


def engine_files(path: Path) -> list[Path]:
    """The files of a vLLM's data-parallel engines that are there: ``path`` of the first, ``path.1`` of the next."""
    others = {
        int(number): other
        for other in path.parent.glob(f"{path.name}.*")
        if (number := other.name[len(path.name) + 1 :]).isdecimal()
    }
    return [*([path] if path.exists() else []), *(others[number] for number in sorted(others))]


def is_raw_name(name: str) -> bool:
    """Whether ``name`` may name a raw file of a run."""
    return bool(_RAW_NAME.fullmatch(name)) and name not in (LOCK, MANIFEST) and not name.endswith(".parquet")


def is_replicate_name(name: str) -> bool:
    """Whether a folder of this name may hold a run: a replicate has exactly one spelling."""
    return bool(_REPLICATE.fullmatch(name))


def is_listed_name(name: str) -> bool:
    """Whether a manifest may list this name: below the run's folder, spelled plainly, not derived, not the manifest."""
    parts = name.split("/")
    if _UNPRINTABLE.search(name) or any(part in ("", ".", "..") for part in parts):
        return False
    return parts[0] != DERIVED and name not in (MANIFEST, LOCK)
