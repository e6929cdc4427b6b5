"""The flags that decide about captured sizes, as an experiment, a recording or a JSON line has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from harness.model.spec import ServerSpec
from harness.model.spec.base import problems_of
from harness.stacks.vllm.graph_rules import GraphFlags, graph_release, graphs_of

_SPECULATIVE = ("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "parallel_drafting")
_COMPILATION = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_OWN = (*_COMPILATION[1:], "enforce_eager", "performance_mode", "max_num_seqs", "max_num_batched_tokens")
_PLACES = {
    **{f"speculative_config.{key}": key for key in _SPECULATIVE},
    **{f"compilation_config.{key}": key for key in _COMPILATION},
    **{key: key for key in _OWN},
}
FLAG_OF_KEY = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "decode_buckets": "cudagraph_capture_sizes",
}
"""Keys of [server], with the flag that each becomes."""
_SHORT = {"sc": "speculative_config", "cc": "compilation_config", "O": "optimization_level"}
_HEADER = {**{key: key for key in (*_COMPILATION[:2], *_OWN[2:], *_SPECULATIVE[1:])}, "speculative_method": "method"}


def graph_flags(values: Mapping[str, Any]) -> GraphFlags:
    """Flags by their names; ValueError names each that is wrong."""
    try:
        return GraphFlags.model_validate(dict(values))
    except ValidationError as error:
        found = [(".".join(map(str, path)), what) for path, what in problems_of(error, GraphFlags)]
        raise ValueError("; ".join(f"{key}: {what}" if key else what for key, what in found)) from None


def flags_of_server(server: ServerSpec) -> dict[str, Any]:
    """What a server of vLLM's own is started with; a key that it leaves to vLLM is absent."""
    found: dict[str, Any] = {flag: getattr(server, key) for key, flag in FLAG_OF_KEY.items() if getattr(server, key)}
    if server.num_speculative_tokens:
        found |= {"num_speculative_tokens": server.num_speculative_tokens, "method": server.speculative_method}
    if (runner := server.env.get("VLLM_USE_V2_MODEL_RUNNER")) in ("0", "1"):
        found["runner"] = "v2" if runner == "1" else "v1"
    return found | flags_of_words(server.extra_args)


def chosen_sizes(server: ServerSpec, version: str = "") -> tuple[int, ...]:
    """The sizes that a vLLM captures for its decode steps where none are given; () where it captures nothing.

    version: as the server shows it. Default, and for one that nobody has read: the newest that is known. Sizes beyond
    the first that holds ``max_num_seqs`` requests, with their drafts, run no decode step.
    """
    most = server.max_num_seqs * (1 + (server.num_speculative_tokens or 0))
    release = graph_release(version)
    sizes = graphs_of(graph_flags({**flags_of_server(server), **({"release": release} if release else {})})).sizes
    return tuple(size for size, before in zip(sizes, (0, *sizes), strict=False) if before < most)


def flags_of_words(words: Sequence[str]) -> dict[str, Any]:
    """The flags of a command line of ``vllm serve`` that decide about graphs."""
    found: dict[str, Any] = {}
    for flag, values in _flags_in(words):
        value = _value(values)
        for key, each in _flat(flag, value):
            if (name := _PLACES.get(key)) is not None:
                found[name] = [each] if name == "cudagraph_capture_sizes" and isinstance(each, int) else each
            elif key == "optimization_level" and each == 0:
                found["cudagraph_mode"] = "NONE"
            elif key == "no_enforce_eager":
                found["enforce_eager"] = False
    return found


def speculative_config(words: Sequence[str]) -> dict[str, Any]:
    """The keys of ``--speculative-config`` on a command line of ``vllm serve``; {} without."""
    flat = (pair for flag, values in _flags_in(words) for pair in _flat(flag, _value(values)))
    return {key.partition(".")[2]: value for key, value in flat if key.startswith("speculative_config.")}


def flags_of_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """What the header of a record shows of a server: its settings in force."""
    release, effective = graph_release(str(header.get("vllm") or "")), header.get("effective")
    if not isinstance(effective, Mapping):
        return {}
    effective = cast("Mapping[str, Any]", effective)
    found = {name: effective[key] for key, name in _HEADER.items() if effective.get(key) is not None}
    if release is not None:
        found["release"] = release
    if isinstance(is_v2 := effective.get("use_v2_model_runner"), bool):
        found["runner"] = "v2" if is_v2 else "v1"
    # Rounded or not, as its process shows them: the rules round them again to the same.
    return {key: value for key, value in found.items() if value != []}


def drafts_in_metrics(metrics: str) -> dict[str, Any]:
    """How many tokens a server drafts for a request and step, by the positions that its metrics count; {} without."""
    positions = re.findall(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos\w*\{[^}]*position="(\d+)"', metrics, re.MULTILINE
    )
    return {"num_speculative_tokens": 1 + max(map(int, positions))} if positions else {}


def answer_lines(lines: Iterable[str]) -> Iterator[str]:
    """The answer to each line of JSON with flags, as JSON; blank lines are skipped. A bad line gives an error."""
    return (_answer(line) for line in lines if line.strip())


def _answer(line: str) -> str:
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("a line is an object of flags: {...}")
        flags = graph_flags(cast("dict[str, Any]", values))
        graphs, (num_seqs, _) = graphs_of(flags), flags.limits
    except json.JSONDecodeError as error:
        return json.dumps({"error": f"not JSON: {error}"})
    except (ValueError, RecursionError) as error:
        return json.dumps({"error": str(error)})
    uniform = [[n, *graphs.uniform(n, flags.query)] for n in range(1, num_seqs + 1)]
    return json.dumps({"sizes": list(graphs.sizes), "mode": graphs.mode, "uniform": uniform})


def _flags_in(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words after it, in vLLM's spelling: dashes are underscores, short names are long."""
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if not word.startswith("-"):
            continue
        flag, has_value, value = word.partition("=")
        if match := re.fullmatch(r"-O(\d)", flag):
            flag, has_value, value = "-O", "=", match[1]
        values = [value] if has_value else []
        while not has_value and place < len(words) and not re.match(r"--?[A-Za-z]", words[place]):
            values.append(words[place])
            place += 1
        first, dot, rest = flag.lstrip("-").replace("-", "_").partition(".")
        yield _SHORT.get(first, first) + dot + rest, values


def _value(values: Sequence[str]) -> Any:
    """The value of a flag: true without a word, JSON, a word, or a list of several."""
    read: list[Any] = []
    for value in values:
        try:
            read.append(json.loads(value))
        except ValueError:
            read.append(value)
    return (read if len(read) > 1 else read[0]) if read else True


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in cast("dict[str, Any]", value).items():
            yield from _flat(f"{key}.{name}", each)
    else:
        yield key, value
