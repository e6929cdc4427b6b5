"""The configuration of an emulator process: server, clock scale, address, logs, faults.

Everything is checked here, before a socket is opened; every problem is a SpecError. The harness passes JSON, people
pass flags.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from harness.errors import SpecError
from harness.measure.emulator.model import VOCAB_SIZE
from harness.measure.emulator.tools import script_of
from harness.model.spec import ServerSpec, Spec, describe_validation_error
from harness.model.spec.server import MOST_SEQS, SERVER_KEYS, key_in_words, keys_of

LogFormat = Literal["default", "precise"]


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
            name, is_given, value = text.partition("=")
            if name not in cls.names():
                raise ValueError(f"unknown fault {name!r}; one of {', '.join(cls.names())}")
            fields[name.replace("-", "_")] = value if is_given else True
        return fields

    @classmethod
    def names(cls) -> list[str]:
        """The faults, as they are written in a command."""
        return [name.replace("_", "-") for name in cls.model_fields]


class EmulatorConfig(Spec):
    """The configuration of an emulator process. time_scale: model ns per wall ns."""

    server: ServerSpec = ServerSpec()
    time_scale: float = Field(default=1.0, gt=0, le=1000, description="model time per wall time")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free port")
    model: str = Field(default="emulated-qwen3-4b", description="served model name")
    vocab_size: int = Field(
        default=VOCAB_SIZE, ge=512, le=VOCAB_SIZE, description="ids of the model; a prompt with a larger id is refused"
    )
    log_format: LogFormat = Field(default="default", description="line format of the log: default or precise")
    log_level: Literal["DEBUG", "INFO"] = Field(
        default="DEBUG", description="DEBUG or INFO; DEBUG adds the [PFX] lines"
    )
    log_requests: bool = Field(default=False, description="log received and added requests")
    bucket_log: bool = Field(default=True, description="log [BUCKET] lines, as a patched vllm-rbln does")
    dev_mode: bool = Field(
        default=False, description="offer POST /reset_prefix_cache, as VLLM_SERVER_DEV_MODE=1 does (rules vllm-paged)"
    )
    enable_prompt_tokens_details: bool = Field(default=True, description="show reused tokens in the usage of answers")
    shutdown_timeout_s: int = Field(default=0, ge=0, description="seconds to drain after SIGTERM; 0: abort")
    trace_path: str | None = Field(default=None, description="file for a JSON line per engine step")
    step_log_path: str | None = Field(default=None, description="file for vLLM's step log (rules vllm-paged)")
    sessions_path: str | None = Field(
        default=None, description="file for the requests of sessions, as the observer writes them (rules vllm-paged)"
    )
    seed: int = Field(default=0, ge=0, description="of the emulated model and of seeded faults")
    replica: int = Field(default=0, ge=0, description="its number: several accept drafts by draws of their own")
    step_factor: float = Field(
        default=1.0, gt=0, le=100, description="times as long as the cost model says that every step lasts"
    )
    tools: str = Field(
        default="", description="tool calls of a chat's answers in turn, as [NAME=]TOKENS,...; 0 or none: a text"
    )
    eos_rate: float = Field(default=0.0, ge=0, lt=1, description="chance that a token is EOS, unless ignore_eos")
    spin_us: int = Field(
        default=200, ge=0, le=2000, description="longest busy-wait before a step's end, wall microseconds; 0: none"
    )
    stall_limit_ms: float = Field(
        default=20.0, gt=0, description="host lateness (wall) beyond which the schedule rebases"
    )
    fault: Fault = Fault()

    @field_validator("server")
    @classmethod
    def _is_emulated(cls, server: ServerSpec) -> ServerSpec:
        if (rules := server.rule_set()).never_mixes:
            raise ValueError(f"servers of the rules {rules.name} are simulated only (harness simulate)")
        return server

    @field_validator("tools")
    @classmethod
    def _tool_script(cls, value: str) -> str:
        script_of(value)
        return value

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
            describe_validation_error(error), where=where, hint="See `harness server emulator --help`"
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


# A flag is its key's name, where no other is given here.
_FLAG_OF = {
    "max_active_seqs": "max-num-active-seqs",
    "shutdown_timeout_s": "shutdown-timeout",
    "sessions_path": "sessions",
    "step_log_path": "step-log",
    "trace_path": "trace",
}
SERVER_FLAGS = tuple(key for key in SERVER_KEYS if key in keys_of("engine", "slots", "paged"))
"""Keys of a ServerSpec that are flags. Every key of an EmulatorConfig is."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness server emulator",
        description="An OpenAI-compatible server that schedules like vLLM with vllm-rbln, timed by a cost model.",
        epilog="example: harness server emulator --port 8000 --decode-buckets 1,2,4,8 --trace steps.jsonl",
    )
    add = parser.add_argument
    add("--config", type=Path, help="JSON file with the keys of EmulatorConfig; flags win over it")
    fields = {key: field for key, field in EmulatorConfig.model_fields.items() if key not in ("server", "fault")}
    for key, field in (fields | {key: ServerSpec.model_fields[key] for key in SERVER_FLAGS}).items():
        default = "" if field.default is None else f" ({field.default})"
        is_switch = bool in (field.annotation, *get_args(field.annotation))
        action = argparse.BooleanOptionalAction if is_switch else "store"
        flag = f"--{_FLAG_OF.get(key, key.replace('_', '-'))}"
        add(
            flag,
            dest=key,
            default=argparse.SUPPRESS,
            action=action,
            help=f"{key_in_words(key) if key in SERVER_FLAGS else field.description}{default}".replace("%", "%%"),
        )
    faults = "one of: " + ", ".join(Fault.names())
    add("--fault", action="append", default=argparse.SUPPRESS, metavar="NAME[=VALUE]", help=faults)
    return parser


def config_from_arguments(arguments: Sequence[str] | None = None) -> EmulatorConfig:
    """The configuration of a command line; raises SpecError for a wrong one."""
    options = vars(_parser().parse_args(arguments))
    path: Path | None = options.pop("config")
    table = {} if path is None else load_config(path)
    given = {key: options.pop(key) for key in SERVER_FLAGS if key in options}
    for key in {"decode_buckets", "synthetic_acceptance_rates"} & given.keys():
        given[key] = given[key].split(",")
    # The default sizes follow from the limit, which must be a number for that; a wrong text is refused later.
    if (limit := str(given.get("max_num_seqs", ""))).isdecimal() and len(limit) <= len(str(MOST_SEQS)):
        given["max_num_seqs"] = int(limit)
    server = table.get("server", {})
    table |= {**options, "server": {**server, **given} if isinstance(server, dict) else server}
    return parse_config(table, where=str(path) if path is not None else "command line")
