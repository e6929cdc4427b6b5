"""``harness server observe``: the recorder of sessions in an environment of vLLM. ``harness predict replay``: the
recorded requests of a server through the rules of its scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.terminal import print_text
from harness.errors import ExitCode, RecordsError, SpecError

if TYPE_CHECKING:
    from harness.extras.formats.vllm_sessions import Chains, ObservedRequest
    from harness.extras.sessions.replay import Replay
    from harness.model.engine import EngineConfig
    from harness.model.engine.config import Drafts

DEFAULT_COSTS = "emulated-gpu"


def replay(
    sessions: Annotated[list[Path], typer.Argument(help="Files of sessions of one engine (VLLM_SESSIONS_FILE).")],
    steps: Annotated[
        Path, typer.Option("--steps", help="The same engine's steps, recorded beside them (VLLM_CORE_STEPS_FILE).")
    ],
    cost_model: Annotated[
        str, typer.Option("--cost-model", help="Compare durations of steps, and TTFT, with it too.")
    ] = "",
) -> None:
    """Say which decisions of a recorded vLLM server its scheduler's rules do not reproduce.

    Requests and aborts are given to the rules before the step before which the server had them, so that costs play no
    part. Exit code 0 where every decision and every number of free KV blocks is the same, 4 where some differ or
    the two files contradict each other, 1 or 2 where nothing was compared.

    Example: `harness predict replay sessions.jsonl --steps core_steps.jsonl`
    """
    found, config = replay_files(sessions, steps, cost_model)
    print_text("\n".join(lines_of(found, config, cost_model)))
    if not found.is_same:
        raise typer.Exit(ExitCode.RULE_FAILED)


def observe(
    environment: Annotated[
        Path | None, typer.Argument(help="Virtual environment that serves, or the folder that holds vllm.")
    ] = None,
    is_removed: Annotated[bool, typer.Option("--remove", help="Remove the recorder from the environment.")] = False,
) -> None:
    """Put the recorder of sessions into an environment of vLLM, and print how a server is started with it.

    It records when requests come and end, their lengths, and which KV blocks they share: no text, and nothing from
    which a text could be found. Nothing that is installed changes, and without VLLM_SESSIONS_FILE it does nothing.
    Without ENVIRONMENT only the lines are printed.

    Example: `harness server observe /opt/vllm`
    """
    from harness.extras.sessions import observe as recorder

    if environment is not None:
        place = recorder.place_of(environment)
        done = recorder.remove(place) if is_removed else recorder.install(place)
        what = "removed" if is_removed else "written"
        print_text("\n".join(f"{what}: {path}" for path in done) if done else "nothing to remove")
    elif is_removed:
        raise SpecError("nothing to remove from", hint="Name the environment")
    if is_removed:
        return
    titles = {
        "Start a server that has it in its environment:": recorder.serve_lines(),
        "A container whose image stays as it is:": recorder.docker_lines(),
        "A pod whose image stays as it is:": recorder.kubernetes_lines(),
    }
    for title, lines in titles.items():
        print_text("\n".join(["", title, *lines]))
    print_text(f"\nThen: harness tune --from {recorder.EXAMPLE} --for http://HOST:8000")


def replay_files(sessions: Sequence[Path], steps: Path, cost_model: str = "") -> tuple[Replay, EngineConfig]:
    """What came of the replay of one engine's files, and the rules that it followed."""
    from harness.extras.sessions.replay import check_same_server, check_settings
    from harness.extras.sessions.replay import replay as replay_steps
    from harness.model.engine import load_cost_model
    from harness.stacks.vllm.step_log import OTHER_STACK, read_step_log

    with SpecError.on_os_error("cannot be read", where=steps, hint="Check the path"):
        log = read_step_log(steps.read_bytes())
    if not log.cores:
        what = "is a stat logger's file, which names no requests"
        raise RecordsError(what, where=str(steps), hint="Record the steps with VLLM_CORE_STEPS_FILE")
    (core, *_more) = log.cores
    if str(core.header.get("scheduler")).startswith(OTHER_STACK):
        what = "is of vllm-rbln, whose scheduler has other rules than vLLM's own"
        raise RecordsError(what, where=str(steps), hint="Nothing was compared; harness trace import reads its sessions")
    if log.num_drafts and cost_model:
        what = f"is of a server that drafts {log.num_drafts} tokens a step, and no cost model knows such steps"
        raise RecordsError(what, where=str(steps), hint="Leave the cost model out: decisions are compared without it")
    config = rules_of(log.settings, log.vllm)
    if log.num_drafts:
        # Where no captured sizes are shown, none are taken: no decision depends on them.
        shown = config.decode_buckets if log.settings.get("decode_buckets") else ()
        drafts = drafts_shown(core.header["effective"], log.num_drafts, release_of(log.vllm))
        config = replace(config, decode_buckets=shown, drafts=drafts)
    requests, chains, block_tokens = read_engine(sessions, int(core.header["engine"]))
    check_settings(config, block_tokens)
    check_same_server(requests[0].server.header, core.header)
    costs = load_cost_model(cost_model or DEFAULT_COSTS)
    found = replay_steps(config, costs, requests, chains, core.steps, has_costs=bool(cost_model))
    if not found.num_steps:
        raise RecordsError("holds no step that ended", where=str(steps), hint="Nothing was compared")
    if num_lost := core.num_damaged + core.num_missing:
        found.notes.insert(0, f"{num_lost} lines of steps are damaged or missing: what follows them may differ by that")
    if why := "; ".join(filter(None, (log.unknown_rules, *unusual_requests(requests)))):
        found.warning = f"the rules are unknown here: {why}"
    return found, config


def drafts_shown(effective: Mapping[str, Any], num_drafts: int, release: str) -> Drafts:
    """The rules of drafts of a release, with what the settings in effect of a server say of its prefix cache."""
    from harness.model.engine.config import EAGLE_METHODS, drafts_of

    method = str(effective.get("speculative_method"))
    drafts = drafts_of(method, num_drafts, release, is_parallel=bool(effective.get("parallel_drafting")))
    # A connector, or a setting, leaves vLLM without hashes that look ahead.
    ahead = min(drafts.key_lookahead, int(effective.get("num_hash_lookahead_tokens", 1)))
    drops = method in EAGLE_METHODS and not ahead and not effective.get("disable_eagle_block_drop")
    return replace(drafts, key_lookahead=ahead, drops_last_match=drops)


def unusual_requests(requests: Sequence[ObservedRequest]) -> Iterator[str]:
    """What the rules do not know of requests, with how many these are."""
    counts = Counter(name for request in requests for name in request.unusual)
    words = {"lora": "use LoRA adapters", "structured": "have structured outputs", "priority": "have a priority"}
    for name, count in counts.items():
        yield f"{count} of {len(requests)} requests {words[name]}"


def release_of(vllm: str) -> str:
    """The release of a version: 0.32.0 of "0.32.0+cpu"."""
    return ".".join(vllm.partition("+")[0].split(".")[:3])


def rules_of(settings: dict[str, object], vllm: str) -> EngineConfig:
    """The rules of a release of vLLM with the settings that its file shows."""
    from harness.model.engine import EngineConfig
    from harness.model.spec import ServerSpec
    from harness.stacks.rbln.rules.kv_rules import PAGED, RULE_SETS

    rules = next((each.name for each in RULE_SETS.values() if release_of(vllm) in each.vllm), PAGED)
    sizes = {} if settings.get("decode_buckets") else {"decode_buckets": (1,)}
    shown = {key: value for key, value in settings.items() if key != "model"}
    server = ServerSpec.model_validate({"rules": rules, "cost_model": DEFAULT_COSTS, **shown, **sizes})
    return EngineConfig.from_server(server)


def read_engine(files: Sequence[Path], engine: int) -> tuple[list[ObservedRequest], Chains, int]:
    """(requests of one engine, their blocks, tokens of a block) by the monotonic clock of its machine."""
    from harness.extras.formats.vllm_sessions import Chains, read_requests
    from harness.model.traces.base import ReadNotes

    seen = [each for each in read_requests(files, ReadNotes(), is_moved=False) if each.server.engine == engine]
    recorders = {each.server.recorder for each in seen}
    if len(recorders) != 1:
        what = f"holds {len(recorders)} servers' requests of engine {engine}"
        raise RecordsError(what, where=", ".join(map(str, files)), hint="Give the files of one start of the server")
    if len({each.server.part for each in seen}) > 1:
        what = "are several files, whose blocks have other names each"
        raise RecordsError(what, where=", ".join(map(str, files)), hint="Record with a larger VLLM_SESSIONS_FILE_BYTES")
    return seen, Chains({each.number: each for each in seen}), seen[0].server.block_tokens


def lines_of(found: Replay, config: EngineConfig, cost_model: str) -> list[str]:
    """What is printed."""
    from harness.extras.sessions.waits import lines_of_waits

    lines = [
        *filter(None, [found.warning]),
        f"{found.num_steps} steps under the rules {config.rules}: {found.num_differ} decisions differ",
        f"cached tokens: {found.num_cached_differ} of {found.num_admitted} admissions differ; preempted: "
        f"{found.num_preempted} recorded, {found.num_preempted_by_rules} by the rules",
    ]
    if found.first_free is not None:
        step, recorded, by_rules = found.first_free
        lines.append(
            f"free KV blocks: {found.num_free_differ} steps differ, first step {step}: {recorded} recorded, "
            f"{by_rules} by the rules"
        )
    if found.first is not None:
        lines.append(f"first: {found.first.sentence}")
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.most_common())
        lines.append(f"by their first difference: {kinds}; what follows the first may follow from it")
    for kind, (count, ratio) in found.typical_ratios().items():
        lines.append(f"cost of {count} {kind} steps: measured is {ratio:.3f} times {cost_model} (median)")
    return [*lines, *lines_of_waits(found.waits, cost_model), *found.notes]
