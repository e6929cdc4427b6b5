"""``harness server sizes``: which sizes a vLLM captures, and which graph a decode batch gets. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.addresses import MaybeExperimentArgument, experiment_with
from harness.cli.terminal import format_duration, print_answers, print_folded, say, show, terminal
from harness.errors import HarnessError, ServerError, SpecError
from harness.table import Table

if TYPE_CHECKING:
    from harness.model.spec import ExperimentSpec

BY_HAND = "Say it: --set KEY=VALUE, e.g. --set num_speculative_tokens=3"


def sizes(
    experiment: MaybeExperimentArgument = None,
    url: Annotated[
        str, typer.Option("--for", metavar="URL", help="This server, as far as it shows its settings.")
    ] = "",
    recording: Annotated[
        str, typer.Option("--from", metavar="FILE", help="The server of a step log or of recorded sessions.")
    ] = "",
    release: Annotated[str, typer.Option(help="Release of vLLM. Default: the one that serves, else the newest.")] = "",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A flag by vLLM's name, or a key of the experiment. Repeatable.")
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="A case of flags per line instead; `-` for standard input.")
    ] = None,
) -> None:
    """Say which sizes vLLM will capture, and which graph a batch gets.

    Sizes count tokens: with N drafts a request, n requests are n * (1 + N) tokens. Names the batches that run without
    a graph, and the fewest sizes that cover them.

    Example: `harness server sizes --set num_speculative_tokens=3 --set cudagraph_capture_sizes=[1,2,4,8]`
    """
    from harness.stacks.vllm.graph_flags import answer_lines

    if jsonl is not None:
        print_answers(jsonl, answer_lines)
        return
    from harness.model.spec.changes import override_table
    from harness.stacks.vllm.graph_flags import graph_flags
    from harness.stacks.vllm.graph_rules import GraphFlags

    own = [text for text in changes or () if text.partition("=")[0].strip() in GraphFlags.model_fields]
    others = [text for text in changes or () if text not in own]
    if others and experiment is None:
        known = ", ".join(GraphFlags.model_fields)
        raise SpecError(f"{others[0]!r} sets no flag of captured sizes", where="--set", hint=f"Known: {known}")
    given = override_table({}, own) | ({"release": release} if release else {})
    seen: dict[GraphFlags, list[str]] = {}
    for name, values in (("--set", {}), *_servers(experiment, others, url, recording)):
        try:
            flags = graph_flags({**values, **given})
        except ValueError as error:
            raise SpecError(str(error), where=f"flags of {name}", hint=BY_HAND) from error
        if name != "--set":
            seen.setdefault(flags, []).append(name)
    for flags, names in seen.items():
        _print(", ".join(names), flags)
    if experiment is not None:
        _print_compiled(experiment_with(experiment, others)[0], given)
    if recording and (config := _recorded_acceptance(Path(recording))):
        print_folded(f"acceptance as recorded, beside the drafter's model: --speculative-config '{config}'")


def notes_of(spec: ExperimentSpec) -> list[str]:
    """The batches without a whole graph of each vLLM that an experiment starts or names, a line each."""
    from harness.stacks.vllm.graph_flags import flags_of_server, graph_flags
    from harness.stacks.vllm.graph_rules import lost_graphs

    notes: list[str] = []
    for condition in spec.condition:
        server = spec.server_of(condition)
        if server.counts_tokens and (server.model or server.url or server.num_speculative_tokens):
            with suppress(ValueError):
                lost = lost_graphs(graph_flags({**_installed(server.environment), **flags_of_server(server)}))
                notes += [f"{condition.name}: {lost}; harness server sizes lists them"] if lost else []
    return notes


def notes_of_server(url: str = "", recording: str = "") -> list[str]:
    """What is known of the graphs of a vLLM that runs and drafts, or that was recorded: a line, or none."""
    from harness.stacks.vllm.graph_flags import flags_of_header, graph_flags
    from harness.stacks.vllm.graph_rules import lost_graphs
    from harness.stacks.vllm.step_log import recorded_header

    header = recorded_header(Path(recording), "effective") if recording else None
    values = flags_of_header(header) if header else {}
    with suppress(ServerError):
        values |= _shown_by(url) if url else {}
    if not (header or "num_speculative_tokens" in values):
        return []
    drafts = values.get("num_speculative_tokens")
    known = f"it drafts {drafts} tokens, and captured sizes count tokens" if drafts else "captured sizes"
    missing = [flag for flag in ("max_num_seqs", "cudagraph_capture_sizes") if flag not in values]
    if drafts and missing:
        words = " ".join(f"--set {flag}=..." for flag in missing)
        return [f"{known}: `harness server sizes --for {url} {words}` names batches without a graph"]
    lost = ""
    with suppress(ValueError):
        lost = lost_graphs(graph_flags(values))
    return [f"{known}: {lost}"] if lost else []


def _servers(
    experiment: Path | None, changes: list[str], url: str, recording: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The flags of each server that is named; without one, vLLM's defaults."""
    from harness.stacks.vllm.graph_flags import flags_of_header, flags_of_server
    from harness.stacks.vllm.step_log import recorded_header

    if url:
        values = _shown_by(url)
        shown = ", ".join(values) or "nothing"
        print_folded(f"shown by {url}: {shown}; the rest is vLLM's default. {BY_HAND}", is_error=True)
        yield url, values
    if recording:
        header = recorded_header(Path(recording), "effective")
        if header is None:
            hint = "Name a step log, or the sessions that a vLLM recorded (docs/guides/vllm-steps.md)"
            raise SpecError("shows no settings of a vLLM", where=recording, hint=hint)
        yield recording, flags_of_header(header)
    if experiment is not None:
        spec, _, _ = experiment_with(experiment, changes)
        for condition in spec.condition:
            server = spec.server_of(condition)
            if server.counts_tokens:
                yield condition.name, {**_installed(server.environment), **flags_of_server(server)}
    if not (url or recording or experiment):
        yield "these flags", {}


def _recorded_acceptance(recording: Path) -> str:
    """The configuration that replays the acceptance of recorded steps; "" where they show none."""
    from harness.errors import RecordsError
    from harness.stacks.vllm.step_log import draft_figures, load_step_log

    with suppress(RecordsError):
        log = load_step_log(recording)
        figures = draft_figures(log)
        if figures is not None and figures.acceptance:
            rates = [round(rate, 4) for rate in figures.acceptance]
            method = {"method": log.effective.get("speculative_method"), "num_speculative_tokens": log.num_drafts}
            return json.dumps({**method, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates})
    return ""


def _installed(environment: str) -> dict[str, str]:
    """The release in an environment, where it is there and known."""
    from harness.stacks.vllm.graph_rules import graph_release
    from harness.stacks.vllm.launch import find_vllm

    try:
        version = find_vllm(environment).versions.get("vllm", "") if environment else ""
    except HarnessError:
        return {}
    return {"release": version} if graph_release(version) else {}


def _shown_by(url: str) -> dict[str, Any]:
    """What a server that runs shows: its release, its settings, and how many tokens it drafts."""
    from harness.measure.client.target import endpoint_of
    from harness.measure.server.life import VERSION, get_at, get_metrics, stated_version
    from harness.model.spec import ServerSpec
    from harness.runner.backends.attached import AttachedBackend
    from harness.stacks.vllm.graph_flags import FLAG_OF_KEY, drafts_in_metrics
    from harness.stacks.vllm.graph_rules import graph_release

    server = ServerSpec(url=url)
    endpoint = endpoint_of(server)
    reply = get_at(endpoint, VERSION)
    if reply.error:
        raise ServerError(reply.error, where=url, hint="Start the server, or name its flags: --set KEY=VALUE")
    version = stated_version(reply)
    found = drafts_in_metrics(get_metrics(endpoint).body.decode("utf-8", "replace"))
    shown = AttachedBackend().all_shown(server)
    keys = ("max_num_seqs", "max_num_batched_tokens", "decode_buckets")
    found |= {FLAG_OF_KEY[key]: shown[key] for key in keys if shown.get(key) is not None}
    return found | ({"release": version} if graph_release(version) else {})


def _print(name: str, flags: Any) -> None:
    """The captured sizes and the batches of one server."""
    from harness.stacks.vllm.graph_rules import decode_batches, graphs_of, lost_graphs

    console = terminal()
    try:
        graphs, lost = graphs_of(flags), lost_graphs(flags)
    except ValueError as error:
        print_folded(f"{name}: does not start: {error}")
        return
    num_seqs, budget = flags.limits
    runner = f"model runner {'V2' if flags.on_v2 else 'V1'}"
    drafts = f", {flags.num_speculative_tokens} drafts by {flags.method or 'a drafter'}" if flags.query > 1 else ""
    print_folded(f"{name}: vLLM {flags.release}, {runner}{drafts}, {num_seqs} requests and {budget} tokens a step")
    captured = (
        f"{len(graphs.sizes)} sizes: {' '.join(map(str, graphs.sizes))}" if graphs.sizes else "nothing is captured"
    )
    print_folded(f"cudagraph_mode {graphs.mode}; {captured}")
    rows: list[tuple[str, ...]] = []
    batches = decode_batches(flags, graphs)
    for (graph, size), group in groupby(
        batches, lambda each: (each.graph, each.padded_tokens if each.graph != "NONE" else 0)
    ):
        first, *_, last = (*group,) * 2
        tokens = [batch.num_tokens for batch in (first, last)]
        rows.append(
            (_span(first.num_requests, last.num_requests), _span(*tokens), str(size) if size else "no padding", graph)
        )
    show(console, Table("", "", ("requests", "tokens", "padded to", "graph"), tuple(rows)))
    if batches and batches[-1].num_requests < num_seqs:
        most = batches[-1].num_requests
        print_folded(f"more than {most} requests do not fit {budget} tokens a step with all drafts")
    if lost:
        say(console, lost, "bold", markup=False)
    if graphs.full and graphs.mode != "FULL":
        print_folded("a batch with a prompt, or a request with fewer drafts, has no FULL graph")


def _print_compiled(spec: ExperimentSpec, given: Mapping[str, Any]) -> None:
    """The decode graphs of servers of vllm-rbln, whose compiled sizes count requests."""
    from harness.model.engine.cost import DeviceSpec
    from harness.stacks.rbln.rules.decode_graphs import decode_queries
    from harness.stacks.rbln.rules.kv_rules import NATIVE
    from harness.stacks.vllm.graph_flags import speculative_config

    device = DeviceSpec()
    seen: dict[tuple[Any, ...], list[str]] = {}
    for condition in spec.condition:
        server = spec.server_of(condition)
        modelled = {"method": server.speculative_method, "num_speculative_tokens": server.num_speculative_tokens}
        drafts = {**modelled, **speculative_config(server.extra_args), **given}
        if not server.counts_tokens:
            key = (server.decode_buckets, drafts.get("method"), drafts.get("num_speculative_tokens") or 0)
            seen.setdefault(key, []).append(condition.name)
    console = terminal()
    for (buckets, method, num_drafts), names in seen.items():
        queries = decode_queries(method, num_drafts)
        num_graphs = len(buckets) * len(queries)
        graphs = f"{len(buckets)} sizes in requests, {num_graphs} decode graphs"
        print_folded(f"{', '.join(names)}: vllm-rbln, {graphs}")
        compile_s = device.compile_base_s + device.compile_call_s * (num_graphs + 1)
        timed = ", whose native path was never timed" if num_drafts else ""
        of_model = f"about {format_duration(compile_s)} by the model of Qwen3-4B on {device.devices} NPUs{timed}"
        print_folded(f"to compile them: {of_model}")
        rows = [
            (_span(1 + before, size), str(size), *(str(size * query) for query in queries))
            for before, size in zip((0, *buckets), buckets, strict=False)
        ]
        heads = tuple(f"tokens, {query} a request" for query in queries)
        show(console, Table("", "", ("requests", "size", *heads), tuple(rows)))
        if num_drafts:
            what = "drafts are of its native path, never run here; `harness simulate` has its rules"
            print_folded(f"{what} ({NATIVE}), and compiled models have none")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
