"""The exact ``vllm serve`` that the harness starts, with the step log laid over PYTHONPATH. Nothing is started here.

Source: vllm 0.30.0 (engine/arg_utils.py, entrypoints/openai/cli_args.py).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import ServerError, SpecError
from harness.measure.records import layout
from harness.measure.records.manifest import Observation
from harness.measure.server.doctor import Check
from harness.measure.server.life import LOOPBACK, LaunchPlan
from harness.measure.server.vllm_serve import (
    Stack,
    VllmPlugin,
    find_stack,
    flag_words,
    requested_plugins,
    scratch_variable,
    serve_environment,
)
from harness.model.engine.config import requested_settings
from harness.model.spec import ServerSpec
from harness.model.spec.server import RETENTION_KEYS, SERVER_KEYS, keys_applied_by, keys_of
from harness.stacks.vllm.step_log import INSIDE, STEP_LOG_KEYS

NO_SIZES = "captures no graphs, so that there are no sizes to set"
LEAVE_OUT = "Leave server.decode_buckets out, in [server] and in every condition"
STEP_LOG = VllmPlugin("vllm_step_log", "VLLM_STEP_LOG_FILE")
CORE_STEPS = VllmPlugin("vllm_step_log", "VLLM_CORE_STEPS_FILE")
SHOWN_KEYS = keys_applied_by("vllm") | STEP_LOG_KEYS
FIXED_KEYS = RETENTION_KEYS | keys_of("slots") | (keys_of("launch") - SHOWN_KEYS)
"""Keys of other stacks, which this launch would ignore."""
PACKAGES = ("vllm", "torch", "transformers", "tpu-inference", "vllm-ascend", "vllm-gaudi", "vllm-spyre")
_WRITTEN_APART = ("model", "num_speculative_tokens")
_FLAGS = {
    row.flag: key for key, row in SERVER_KEYS.items() if row.flag and key in SHOWN_KEYS.difference(_WRITTEN_APART)
}
_KEY_OF = {**_FLAGS, "--host": "port", "--port": "port", "--model": "model"}
_LOG_FLAGS = ("--disable-log-stats", "--cudagraph-metrics", "--enable-logging-iteration-details", "--api-server-count")


# Each ends capturing: https://docs.vllm.ai, "enforce-eager"; -O0; cudagraph_mode of --compilation-config.
_WITHOUT_GRAPHS = re.compile(r"--enforce[-_]eager|-O\.?0|--optimization[-_]level=0|.*cudagraph_mode\W+NONE.*")


# Of a GPU's worker, at the end of its start. Source: vllm 0.32.0, v1/worker/gpu_worker.py, compile_or_warm_up_model.
_MEMORY = re.compile(
    r"Free memory on device \([\d.]+/(?P<device>[\d.]+) GiB\) on startup\. Desired GPU memory utilization is "
    r"\((?P<share>[\d.]+), .*?Current kv cache memory in use is (?P<cache>[\d.]+) GiB"
)


def utilization_for(log: str, blocks: int, wanted: int) -> float | None:
    """The ``--gpu-memory-utilization`` that has room for so many KV blocks, rounded up to a thousandth.

    log: of a server with ``blocks``. None where it does not show its memory; above 1 where a device has no such room.
    """
    found = _MEMORY.search(log)
    if found is None:
        return None
    device, share, cache = (float(found[name]) for name in ("device", "share", "cache"))
    return math.ceil(1000 * (share + (wanted - blocks) / blocks * cache / device)) / 1000


def find_vllm(environment: str = "") -> Stack:
    """The vLLM in a virtual environment, or the one on PATH; ServerError says what is missing."""
    hint = "Install vLLM for your device and name its virtual environment (docs/guides/vllm-steps.md)"
    return find_stack(environment, PACKAGES, hint)


def check_serving(server: ServerSpec) -> None:
    """Refuse, with a SpecError, a server that ``vllm serve`` cannot be started as."""
    if server.num_speculative_tokens and server.has_drafts:
        what = "asks for speculative decoding a second time"
        raise SpecError(what, where="server.extra_args", hint="Keep it or server.num_speculative_tokens")
    if not server.model:
        raise SpecError("is missing", where="server.model", hint="Name the model, as `vllm serve` takes it")
    for word in server.extra_args:
        flag = word.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
        if flag in _KEY_OF:
            raise SpecError(f"repeats server.{_KEY_OF[flag]}", where=f"server.extra_args: {word}", hint="Use the key")
        if flag in _LOG_FLAGS:
            raise SpecError(
                "is set by the harness for the step log", where=f"server.extra_args: {word}", hint="Leave it out"
            )
        if server.decode_buckets and _WITHOUT_GRAPHS.fullmatch(word):
            raise SpecError(NO_SIZES, where=f"server.extra_args: {word}", hint=LEAVE_OUT)


def check_graphs(server: ServerSpec, versions: Mapping[str, str]) -> None:
    """Refuse, with a SpecError, captured sizes on a build of vLLM that captures none."""
    if server.decode_buckets and versions.get("vllm", "").endswith("cpu"):
        raise SpecError(NO_SIZES, where=f"server.environment: vllm {versions['vllm']}", hint=LEAVE_OUT)


def key_arguments(server: ServerSpec) -> tuple[str, ...]:
    """The keys of a server as flags; what is left to vLLM is left out. Without rates a drafter's own guesses count."""
    words = tuple(word for flag, key in _FLAGS.items() for word in flag_words(flag, getattr(server, key)))
    drafts = server.num_speculative_tokens
    if not drafts:
        return words
    keys = {"method": server.speculative_method, "model": server.speculative_model, "num_speculative_tokens": drafts}
    config: dict[str, Any] = {key: value for key, value in keys.items() if value}
    if rates := server.synthetic_acceptance_rates:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates[:drafts]}
    return (*words, SERVER_KEYS["num_speculative_tokens"].flag, json.dumps(config))


def serve_arguments(server: ServerSpec, port: int) -> tuple[str, ...]:
    """The arguments after ``vllm``."""
    return (
        "serve",
        server.model,
        *("--host", LOOPBACK, "--port", str(port)),
        *key_arguments(server),
        *("--cudagraph-metrics", "--enable-logging-iteration-details", "--api-server-count", "1"),
        "--enable-prompt-tokens-details",
        *("--generation-config", "vllm"),
        *("--shutdown-timeout", str(max(1, int(server.stop_grace_s)))),
        *server.extra_args,
    )


def serve_plan(server: ServerSpec, *, backend: str, port: int, run_folder: Path) -> LaunchPlan:
    """The launch of ``vllm serve``, whose step logs are written into the run's folder."""
    check_serving(server)
    vllm, asked = find_vllm(server.environment), requested_settings(server)
    files = {"step_log": (run_folder / layout.STEP_LOG).absolute()}
    plugin = STEP_LOG.variables(files["step_log"], requested_plugins(server, os.environ))
    if server.observer:
        files["core_steps"] = (run_folder / layout.CORE_STEPS).absolute()
        plugin |= {CORE_STEPS.file_variable: str(files["core_steps"])}
    return LaunchPlan(
        backend=backend,
        argv=(str(vllm.vllm), *serve_arguments(server, port)),
        host=LOOPBACK,
        port=port,
        model=server.model,
        env=serve_environment(server, {}, [str(INSIDE)], plugin),
        files=files,
        requested={"server": server.model_dump(mode="json"), "versions": dict(vllm.versions)},
        observation=Observation(steps="step-log", has_kv_log=False),
        effective={
            key: asked[key] for key in sorted(keys_applied_by("vllm") - STEP_LOG_KEYS) if asked.get(key) is not None
        },
        scratch_variable=scratch_variable(server.env),
        warms_up=True,
    )


def readiness(backend: str, environment: str = "") -> Check:
    """The doctor's line: whether a vLLM is in an environment, or on PATH, and what its steps can show."""
    seen = "every engine step, stamped in the engine core, with its padding where the model runner reports it"
    try:
        versions = find_vllm(environment).versions
        found = ", ".join(f"{name} {version}" for name, version in versions.items()) or "vllm of unknown version"
        ok = True
        if versions.get("vllm", "").endswith("cpu"):
            seen = "every engine step, stamped in the engine core; a CPU captures no graphs, so that b = n"
    except ServerError as error:
        found, ok = error.what, None
    return Check(
        name=f"backend {backend}",
        ok=ok,
        found=f"{found}; {seen}",
        need="vLLM 0.30 or newer for your device, and server.model",
        how="Install vLLM for your device, and name its virtual environment: server.environment (docs/guides/gpu.md)",
    )
