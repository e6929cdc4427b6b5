"""The configuration of an emulator process: server, clock scale, address, logs, faults.

Everything is checked here, before a socket is opened; every problem is a SpecError. The harness passes JSON, people
pass flags.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from harness.errors import SpecError
from harness.spec import ServerSpec, Spec, describe_validation_error

LogFormat = Literal["default", "precise"]
FAULTS = {
    "hang-after-steps": int,
    "crash-after-steps": int,
    "slow-start-s": float,
    "never-ready": bool,
    "early-stop": int,
    "http-500-rate": float,
    "copy-fails-at": int,
}


class Fault(Spec):
    """Deliberate faults, for tests of clients and of the harness; the default is none.

    hang_after_steps, crash_after_steps: engine steps served before the engine stops for ever, or the process dies.
    early_stop: tokens that are missing from every answer (at least one is given). copy_fails_at: KV copies that succeed
    before one fails: a full prefill from vllm-rbln 0.12 on, the end of the engine before.
    """

    hang_after_steps: int | None = Field(default=None, ge=0)
    crash_after_steps: int | None = Field(default=None, ge=0)
    slow_start_s: float = Field(default=0.0, ge=0)
    never_ready: bool = False
    early_stop: int = Field(default=0, ge=0)
    http_500_rate: float = Field(default=0.0, ge=0, le=1)
    copy_fails_at: int | None = Field(default=None, ge=0)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> dict[str, Any]:
        """Fields from ``name`` or ``name=value`` texts; an unknown name is a ValueError."""
        fields: dict[str, Any] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in FAULTS:
                raise ValueError(f"unknown fault {name!r}; one of {', '.join(FAULTS)}")
            fields[name.replace("-", "_")] = True if FAULTS[name] is bool else value
        return fields


class EmulatorConfig(Spec):
    """The configuration of an emulator process. time_scale: model ns per wall ns."""

    server: ServerSpec = ServerSpec()
    time_scale: float = Field(default=1.0, gt=0, le=1000)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    model: str = "emulated-qwen3-4b"
    log_format: LogFormat = "default"
    log_level: Literal["DEBUG", "INFO"] = "DEBUG"
    log_requests: bool = False
    bucket_log: bool = Field(default=True, description="log [BUCKET] lines, as a patched vllm-rbln does")
    enable_prompt_tokens_details: bool = True
    shutdown_timeout_s: int = Field(default=0, ge=0)
    trace_path: str | None = None
    step_log_path: str | None = Field(default=None, description="the step log of a server with paged KV memory")
    seed: int = Field(default=0, ge=0)
    step_factor: float = Field(
        default=1.0, gt=0, le=100, description="times as long as the cost model says that every step lasts"
    )
    eos_rate: float = Field(default=0.0, ge=0, lt=1, description="chance that a token is EOS, unless ignore_eos")
    spin_us: int = Field(
        default=200, ge=0, le=2000, description="longest busy-wait before a step's end, wall microseconds; 0: none"
    )
    stall_limit_ms: float = Field(
        default=20.0, gt=0, description="host lateness (wall) beyond which the schedule rebases"
    )
    fault: Fault = Fault()

    @field_validator("fault", mode="before")
    @classmethod
    def _fault_texts(cls, value: Any) -> Any:
        return Fault.parse([str(text) for text in value]) if isinstance(value, list) else value


def parse_config(table: Any, *, where: str) -> EmulatorConfig:
    """An EmulatorConfig from a JSON object; raises SpecError with every wrong key."""
    try:
        return EmulatorConfig.model_validate(table)
    except ValidationError as error:
        raise SpecError(
            describe_validation_error(error), where=where, hint="See `python -m harness.emulator --help`"
        ) from error


def load_config(path: Path) -> dict[str, Any]:
    """The JSON object in a configuration file; every failure is a SpecError naming the file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"is not valid JSON: {error}", where=str(path), hint="Mend the place named") from error
    if not isinstance(table, dict):
        raise SpecError("must hold one JSON object", where=str(path), hint='Write {"server": {...}, ...}')
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.emulator",
        description="An OpenAI-compatible server that schedules like vLLM with vllm-rbln, timed by a cost model.",
        epilog="example: python -m harness.emulator --port 8000 --decode-buckets 1,2,4,8 --trace steps.jsonl",
    )
    add = parser.add_argument
    add("--config", type=Path, help="JSON file with the keys of EmulatorConfig; flags win over it")
    add("--host", help="address to listen on (127.0.0.1)")
    add("--port", type=int, help="port to listen on; 0 takes any free one (8000)")
    add("--model", help="served model name (emulated-qwen3-4b)")
    add("--time-scale", type=float, dest="time_scale", help="model time per wall time (1)")
    add("--max-num-seqs", type=int, dest="max_num_seqs", help="most requests running at once (8)")
    add("--max-num-active-seqs", type=int, dest="max_active_seqs", help="most requests admitted at once (max-num-seqs)")
    add("--rules", help="scheduler and KV rules, see `harness explain server` (auto)")
    add("--decode-buckets", dest="decode_buckets", help="compiled decode batch sizes, e.g. 1,2,4,8")
    add("--kv-slots", type=int, dest="kv_slots", help="KV slots (max-num-seqs)")
    add("--slot-tokens", type=int, dest="slot_tokens", help="tokens per slot = max_model_len (8192)")
    add("--cost-model", dest="cost_model", help="cost model name or TOML path (paper)")
    add("--no-prefix-caching", action="store_true", help="recompute every prompt")
    add("--log-format", choices=["default", "precise"], dest="log_format", help="line format of the log (default)")
    add("--log-level", choices=["DEBUG", "INFO"], dest="log_level", help="DEBUG adds the [PFX] lines (DEBUG)")
    add(
        "--log-requests", action="store_true", default=None, dest="log_requests", help="log received and added requests"
    )
    add("--shutdown-timeout", type=int, dest="shutdown_timeout_s", help="seconds to drain after SIGTERM; 0 aborts (0)")
    add("--step-log", dest="step_log_path", help="file for vLLM's step log (rules vllm-paged)")
    add("--num-gpu-blocks", type=int, dest="num_gpu_blocks", help="KV blocks (rules vllm-paged)")
    add("--block-size", type=int, dest="block_size", help="tokens of a KV block (rules vllm-paged: 16)")
    add(
        "--max-num-batched-tokens",
        type=int,
        dest="max_num_batched_tokens",
        help="most tokens of a step (rules vllm-paged: 2048)",
    )
    add("--trace", dest="trace_path", help="file for one JSON line per engine step")
    add("--seed", type=int, help="seed of the emulated model and of seeded faults (0)")
    add("--eos-rate", type=float, dest="eos_rate", help="chance that a token is EOS unless ignore_eos (0)")
    add("--step-factor", type=float, dest="step_factor", help="every step lasts so many times as long (1)")
    add("--spin-us", type=int, dest="spin_us", help="longest busy-wait before a step's end, microseconds (200)")
    add("--fault", action="append", metavar="NAME[=VALUE]", help="one of: " + ", ".join(FAULTS))
    return parser


SERVER_FLAGS = (
    *("max_num_seqs", "max_active_seqs", "rules", "decode_buckets", "kv_slots", "slot_tokens", "cost_model"),
    *("num_gpu_blocks", "block_size", "max_num_batched_tokens"),
)


def config_from_arguments(arguments: Sequence[str] | None = None) -> EmulatorConfig:
    """The configuration of a command line; raises SpecError for a wrong one."""
    options = vars(_parser().parse_args(arguments))
    path: Path | None = options.pop("config")
    table = {} if path is None else load_config(path)
    server = dict(table.get("server", {})) if isinstance(table.get("server", {}), dict) else table["server"]
    if options.pop("no_prefix_caching"):
        server["prefix_caching"] = False
    for name in SERVER_FLAGS:
        if (value := options.pop(name)) is not None:
            server[name] = value
    if isinstance(server, dict) and isinstance(server.get("decode_buckets"), str):
        try:
            server["decode_buckets"] = [int(part) for part in server["decode_buckets"].split(",")]
        except ValueError as error:
            raise SpecError(
                f"{server['decode_buckets']!r} is not a list of whole numbers",
                where="--decode-buckets",
                hint="Write them like 1,2,4,8",
            ) from error
    table.update({name: value for name, value in options.items() if value is not None})
    table["server"] = server
    return parse_config(table, where=str(path) if path is not None else "command line")
