"""A first experiment on servers that run already: one on its own sessions, or two against each other.

They are asked what they are; nothing is started or changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from harness.cli.doctor import await_server
from harness.errors import ServerError, SpecError, printable
from harness.kinds import ServingStack

if TYPE_CHECKING:
    from harness.measure.server.probe import ProbeReport
    from harness.model.spec import ServerSpec
    from harness.runner.backends.base import FirstExperiment, Line
    from harness.stacks.rbln.launch.launch_log import LaunchFacts
    from harness.stacks.vllm.step_log import RecordedServer

MOST_SERVERS = 2
KEY_ELSEWHERE = "holds the key; the key itself is in no record"
DECLARED: Line = ("declared = true", "what nothing shows is as written here; reports call it declared")
NO_METRICS: Line = ("needs_metrics = false", "GET /metrics gives nothing")


@dataclass(frozen=True)
class Shown:
    """A server that runs, as the file writes it. lines: of [server], besides its address. room_tokens: longest request
    that fits it, as far as known. values: settings in force by key. notes: how it is unlike its recording."""

    url: str
    report: ProbeReport
    lines: tuple[Line, ...]
    room_tokens: int
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def address(self) -> Line:
        """Its URL, with the model that it serves."""
        version = f", vLLM {self.report.version}" if self.report.version else ""
        return f'url = "{self.url}"', printable(f"serves {self.report.model}{version}")

    @property
    def shown_keys(self) -> set[str]:
        """Keys of [server] whose values it shows."""
        return {*self.values, *({"kv_slots"} if "usable_kv_slots" in self.values else ())}

    @property
    def has_costs(self) -> bool:
        """Whether a shipped cost model predicts it."""
        from harness.stacks.rbln.rules.kv_rules import is_paged

        return not is_paged(self.values.get("rules", "")) or "cost_model" in self.values


def experiment_on(
    urls: Sequence[str], api_key_env: str, wait_s: float, stack: ServingStack | None, recorded: RecordedServer | None
) -> FirstExperiment:
    """A first experiment on one server, or on two that are compared. A server that is starting is waited for.

    stack: as the user says. recorded: the server of a recording.
    Raises ServerError where one cannot be measured, SpecError where they are too many or the same, or where nothing
    shows which stack serves.
    """
    from harness.model.spec import ServerSpec
    from harness.runner.backends.attached import ABOUT
    from harness.runner.backends.base import FirstExperiment

    if len(urls) > MOST_SERVERS or len({url.rstrip("/") for url in urls}) < len(urls):
        what = f"takes one server, or two that differ, not {', '.join(urls)}"
        raise SpecError(what, where="--for", hint="A third one is a [[condition]] of its own with its server.url")
    servers = [ServerSpec(url=url, api_key_env=api_key_env) for url in urls]
    for server in servers:
        await_server(server, wait_s)
    reports, form = _probed(servers)
    shown = [_shown(server, report, stack, recorded) for server, report in zip(servers, reports, strict=True)]
    start = FirstExperiment(
        about=ABOUT,
        limits=() if all(report.has_metrics for report in reports) else (NO_METRICS,),
        server=((f'api_key_env = "{api_key_env}"', KEY_ELSEWHERE),) if api_key_env else (),
        room_tokens=min(each.room_tokens for each in shown),
        prompt_form=form,
        has_costs=all(each.has_costs for each in shown),
        notes=tuple(note for each in shown for note in each.notes),
    )
    if len(shown) == 1:
        (only,) = shown
        return replace(start, server=(only.address, *start.server, *only.lines))
    return _compared(start, *shown)


def _compared(start: FirstExperiment, first: Shown, second: Shown) -> FirstExperiment:
    """The experiment that asks which of two servers costs less: what both show is written once."""
    common = tuple(line for line in first.lines if line in second.lines)
    (first_name, second_name), differ = _names(first.url, second.url), _differences(first, second)
    what = f"They differ in {'; '.join(differ)}." if differ else "They show the same settings."

    varied = {line[0].partition(" ")[0] for line in {*first.lines, *second.lines} - {*common, DECLARED}}

    def condition(name: str, each: Shown) -> tuple[Line, ...]:
        own = [line for line in (each.address, *each.lines) if line not in common]
        if varied - each.shown_keys and DECLARED not in each.lines:
            own.append(DECLARED)
        return (f'name = "{name}"', ""), *((f"server.{text}", comment) for text, comment in own)

    return replace(
        start,
        question=f"Do these agents cost less on {second.url} than on {first.url}? {what}",
        server=(*start.server, *common),
        base=condition(first_name, first),
        other=(("[[condition]]", "the other server, on the same plans"), *condition(second_name, second)),
    )


def _differences(first: Shown, second: Shown) -> list[str]:
    """What two servers show differently, in words: "kv_slots (8 and 12)"; what one of them does not show too."""
    sides = [
        {"model": each.report.model, "vLLM": each.report.version or "not stated", **each.values}
        for each in (first, second)
    ]
    return [
        printable(f"{key} ({' and '.join(str(side.get(key, 'not shown')) for side in sides)})")
        for key in dict.fromkeys([*sides[0], *sides[1]])
        if sides[0].get(key) != sides[1].get(key) and not (key == "usable_kv_slots" and "kv_slots" in sides[0])
    ]


def _names(first: str, second: str) -> tuple[str, str]:
    """Names of two conditions: the hosts, or the ports where the host is one, or first and second."""
    parts = [urlsplit(url) for url in (first, second)]
    for names in ([part.hostname or "" for part in parts], [f"port-{part.port}" for part in parts]):
        written = ["-".join(re.findall(r"[a-z0-9]+", name.lower()))[:40] for name in names]
        if len(set(written)) > 1 and all(written):
            return written[0], written[1]
    return "first", "second"


def _shown(
    server: ServerSpec, report: ProbeReport, said: ServingStack | None, recording: RecordedServer | None
) -> Shown:
    """What one server shows of its settings; what it does not show, as its recording does."""
    from harness.runner.backends.attached import AttachedBackend, facts_of
    from harness.runner.backends.base import SLOT_TOKENS

    facts = facts_of(server)
    stack = _stack_of(server, said, recording, facts)
    values = shown = AttachedBackend().all_shown(server, stack, facts)
    recorded = recording.settings if recording is not None and stack is ServingStack.vllm else {}
    comments = dict.fromkeys(recorded.keys() - values.keys(), "by its recording, not shown now")
    differing = {key: value for key, value in recorded.items() if key in values and values[key] != value}
    comments |= {key: f"shown by the server; when it was recorded: {value}" for key, value in differing.items()}
    values = {**recorded, **values}
    longest, can_be_written = _longest(values)
    lines: list[Line] = [
        (line, printable(comments.get(key, "shown by the server")))
        for key, line in _shown_lines(values, differing.keys()).items()
    ]
    if can_be_written and (longest != SLOT_TOKENS or "slot_tokens" in differing):
        lines.append((f"slot_tokens = {longest}", printable(comments.get("slot_tokens", "its max_model_len"))))
    if stack is ServingStack.vllm:
        lines.insert(0, (f"model = {json.dumps(report.model)}", "its name there"))
    if "max_num_seqs" not in values:
        lines.append(("max_num_seqs = 8", "assumed, not shown: write what the server was started with"))
    if "max_num_seqs" not in values or recorded.keys() - shown.keys():
        lines.append(DECLARED)
    room = longest if can_be_written else min(longest, SLOT_TOKENS)
    notes = [f"{key} = {was} when it was recorded, {values[key]} now" for key, was in differing.items()]
    notes += _another_model(str(recorded.get("model", "")), report.model)
    return Shown(server.url, report, tuple(lines), room, values, tuple(f"{server.url}: {note}" for note in notes))


def _another_model(recorded: str, served: str) -> list[str]:
    """What to say where neither of a model's path and the name that serves it ends with the other's last part."""
    paths = [name.rstrip("/") for name in (recorded, served)]
    last, served_last = (path.rpartition("/")[2] for path in paths)
    if not recorded or paths[0].endswith(served_last) or paths[1].endswith(last):
        return []
    return [f"the model was {recorded} when it was recorded, {served} now"]


def started_as_recorded(start: FirstExperiment, recorded: RecordedServer) -> FirstExperiment:
    """The experiment on servers that the harness starts with the settings of a recorded one."""
    settings, comment = recorded.settings, "as it was recorded"
    longest, can_be_written = _longest(settings)
    lines = {**_shown_lines(dict(settings)), **({"slot_tokens": f"slot_tokens = {longest}"} if can_be_written else {})}
    lines |= {"model": f"model = {json.dumps(settings['model'])}"} if "model" in settings else {}
    lines |= {"extra_args": 'extra_args = ["--enforce-eager"]'} if recorded.is_eager else {}
    kept = [line for line in start.server if line[0].partition(" ")[0] not in lines]
    own = [(line, comment) for _, line in sorted(lines.items(), key=lambda pair: pair[0] != "model")]
    return replace(start, server=(*own, *kept), room_tokens=longest if can_be_written else start.room_tokens)


def _longest(settings: Mapping[str, Any]) -> tuple[int, bool]:
    """The longest request that a server takes, and whether a file can say so."""
    from harness.model.spec.server import MOST_CONTEXT_TOKENS
    from harness.runner.backends.base import SLOT_TOKENS

    longest = int(settings.get("slot_tokens", SLOT_TOKENS))
    return longest, 256 <= longest <= MOST_CONTEXT_TOKENS and longest % 128 == 0


def _stack_of(
    server: ServerSpec, said: ServingStack | None, recording: RecordedServer | None, facts: LaunchFacts
) -> ServingStack | None:
    """Which stack serves; None where it is no vLLM. SpecError where a vLLM shows neither, or another than is said."""
    from harness.runner.backends.attached import AttachedBackend

    found, by = AttachedBackend().stack_shown(server, facts)
    recorded = None if recording is None else recording.stack
    for where, stack in (("--stack", said), ("the recording", recorded)):
        if stack and found and stack != found:
            names = {ServingStack.vllm: "vLLM itself", ServingStack.rbln: "vllm-rbln"}
            what = f"is {names[found]} by {by}, and {names[stack]} by {where}"
            raise SpecError(what, where=server.url, hint="Name the server that was meant, or leave the other out")
    stack = found or said or recorded
    if stack is None and by:
        raise SpecError(
            "nothing that it shows tells vLLM itself from vllm-rbln",
            where=server.url,
            hint="Say --stack vllm or --stack rbln; a recording of the server says it too: --from FILE",
        )
    return stack


def _probed(servers: Sequence[ServerSpec]) -> tuple[list[ProbeReport], str]:
    """The answers of the servers, and the form of prompts that all of them take: "" for the default."""
    from harness.measure.client.target import endpoint_of
    from harness.measure.server.probe import Needs, probe
    from harness.model.spec import ClientSpec, PromptForm

    first: list[ProbeReport] = []
    for form in get_args(PromptForm):
        needs = Needs(ClientSpec(), form, metrics=False)
        reports = [probe(endpoint_of(server), needs) for server in servers]
        if not any(report.problems for report in reports):
            return reports, form if first else ""
        first = first or reports
    server, report = next(pair for pair in zip(servers, first, strict=True) if pair[1].problems)
    hint = f"`harness doctor --url {server.url}` asks it again"
    raise ServerError("; ".join(report.problems), where=server.url, hint=hint)


def _shown_lines(shown: dict[str, Any], also: Set[str] = frozenset()) -> dict[str, str]:
    """Settings in force that are not the defaults, and those of ``also``: a line of TOML by key."""
    from harness.model.spec.server import DEFAULTS, ENGINE_KEYS, SERVER_KEYS, default_buckets
    from harness.shipped import shipped_names
    from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE, is_paged

    limit = shown.get("max_num_seqs", DEFAULTS["max_num_seqs"])
    settings = dict(shown)
    if is_paged(shown.get("rules", "")):
        settings = {key: value for key, value in shown.items() if key != "max_active_seqs"}
    elif "usable_kv_slots" in shown:
        # Below the limit, the vendor sets one slot aside.
        usable = shown["usable_kv_slots"]
        settings.setdefault("kv_slots", usable if usable >= limit else usable + 1)
    if shown.get("cost_model") not in shipped_names("costs"):
        # A file on the host of the server is none here.
        settings.pop("cost_model", None)
    # A vLLM captures sizes of its own choice where none are written.
    sizes = [] if is_paged(shown.get("rules", "")) else list(default_buckets(limit))
    usual = {**DEFAULTS, "rules": NEWEST_STABLE, "decode_buckets": sizes, "kv_slots": limit, "max_active_seqs": limit}
    shown_here = settings.keys() & ENGINE_KEYS - {"slot_tokens"}
    kept = [key for key in SERVER_KEYS if key in shown_here and (key in also or settings[key] != usual[key])]
    return {key: f"{key} = {json.dumps(settings[key])}" for key in kept}
