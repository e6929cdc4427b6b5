"""Result files of other benchmarks as a side of a comparison: vLLM bench, AIPerf, GuideLLM, with per-request records.

Figures are computed from the records as those of our runs are; a figure that the records do not hold is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.analysis.compare.across import PeerSide
from harness.analysis.compare.measures import Value
from harness.analysis.stats import quantile
from harness.clock import NS_PER_S
from harness.errors import SpecError, in_one_line
from harness.inputs import open_regular
from harness.measure.records.layout import MANIFEST

MS_PER_S = 1000.0
SUFFIXES = (".json", ".jsonl")
Figures = dict[str, Value]


def peer_side(places: Sequence[Path]) -> PeerSide | None:
    """The results of one other benchmark in files or folders; None where the places are folders without any.

    Raises SpecError for a file that is no such result, for results of several benchmarks, and for a mix of files and
    sealed runs.
    """
    by_place = {place: _results(place) for place in places}
    if not any(by_place.values()):
        return None
    if missing := [place for place, results in by_place.items() if not results]:
        raise SpecError(
            "holds no result of another benchmark, as the other places do",
            where=str(missing[0]),
            hint="Name sealed runs with --baseline",
        )
    results = [result for found in by_place.values() for result in found]
    tools = sorted({tool for tool, _, _ in results})
    if len(tools) > 1:
        raise SpecError(f"results of {' and '.join(tools)}", where=str(places[0]), hint="Compare with one at a time")
    origins = dict.fromkeys(origin for _, _, origin in results if origin)
    return PeerSide(", ".join(map(str, places)), tools[0], tuple(run for _, run, _ in results), " ".join(origins))


def _results(place: Path) -> list[tuple[str, Figures, str]]:
    """(tool, figures, origin) of a file, or of every result in a folder that holds no sealed runs."""
    if not place.is_dir():
        return [_result(place)] if place.is_file() and place.suffix in SUFFIXES else []
    if next(place.rglob(MANIFEST), None) is not None:
        return []
    paths = sorted(path for path in place.rglob("*") if path.suffix in SUFFIXES)
    return [_result(path) for path in paths if _tool(_content(path))]


def _result(path: Path) -> tuple[str, Figures, str]:
    content = _content(path)
    tool = _tool(content)
    if not tool:
        raise SpecError(
            "is no result of vLLM bench, AIPerf or GuideLLM with per-request records",
            where=str(path),
            hint="Use vllm bench serve --save-detailed, AIPerf's profile_export.jsonl or GuideLLM's benchmarks.json",
        )
    try:
        figures, origin = _READERS[tool](content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise SpecError(
            f"is no {tool} result that this version reads ({type(error).__name__}: {in_one_line(error)})",
            where=str(path),
            hint="docs/guides/export.md names the versions that were tried",
        ) from error
    return tool, figures, origin


def _content(path: Path) -> Any:
    """The JSON value of a file, or the list of its lines; None where it is neither."""
    try:
        with open_regular(path) as stream:
            text = stream.read().decode()
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read ({in_one_line(error)})", where=str(path), hint="Check the path") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def _tool(content: Any) -> str:
    """Which benchmark made it; "" where there are no per-request records of one that is known."""
    if isinstance(content, dict):
        if "ttfts" in content and "itls" in content:
            return "vllm-bench"
        # A record alone is also a file of one line.
        return "guidellm" if "benchmarks" in content else "aiperf" if {"metadata", "metrics"} <= set(content) else ""  # pyright: ignore[reportUnknownArgumentType]
    is_records = isinstance(content, list) and bool(content)  # pyright: ignore[reportUnknownArgumentType]
    return "aiperf" if is_records and all(_tool(line) == "aiperf" for line in content) else ""


def _vllm(content: Mapping[str, Any]) -> tuple[Figures, str]:
    answered = [place for place, error in enumerate(content["errors"]) if not error]
    ttfts, gaps = ([content[key][place] for place in answered] for key in ("ttfts", "itls"))
    whole = content.get("latencies")
    latencies = [whole[place] if whole else ttfts[row] + sum(gaps[row]) for row, place in enumerate(answered)]
    tokens = sum(content["output_lens"][place] for place in answered)
    figures = _figures(
        ttft_ms=[MS_PER_S * value for value in ttfts],
        itl_ms=[MS_PER_S * gap for one in gaps for gap in one],
        e2e_ms=[MS_PER_S * value for value in latencies],
        tokens_per_s=tokens / content["duration"],
    )
    return figures, str(content.get("harness_origin", ""))


def _aiperf(content: Any) -> tuple[Figures, str]:
    lines = content if isinstance(content, list) else [content]
    records = [
        line
        for line in lines
        if line.get("error") is None
        and not line["metadata"].get("was_cancelled")
        and line["metadata"]["benchmark_phase"] == "profiling"
    ]
    starts, ends = ([record["metadata"][f"request_{key}_ns"] for record in records] for key in ("start", "end"))

    def values(name: str) -> list[Any]:
        found = [record["metrics"][name] for record in records if name in record["metrics"]]
        if units := {metric["unit"] for metric in found} - {"ms", "tokens"}:
            raise ValueError(f"{name} in {', '.join(sorted(units))}")
        return [metric["value"] for metric in found]

    figures = _figures(
        ttft_ms=values("time_to_first_token"),
        itl_ms=[gap for gaps in values("inter_chunk_latency") for gap in gaps],
        e2e_ms=values("request_latency"),
        tokens_per_s=sum(values("output_sequence_length")) / (max(ends) - min(starts)) * NS_PER_S,
    )
    return figures, str(records[0]["metadata"].get("harness_origin", ""))


def _guidellm(content: Mapping[str, Any]) -> tuple[Figures, str]:
    if len(content["benchmarks"]) != 1:
        raise ValueError(f"{len(content['benchmarks'])} benchmarks in one report, one is needed")
    (benchmark,) = content["benchmarks"]
    requests = benchmark["requests"]["successful"]
    figures = _figures(
        ttft_ms=[request["time_to_first_token_ms"] for request in requests],
        # A report has the mean gap of each request, not its gaps.
        itl_ms=[],
        e2e_ms=[MS_PER_S * request["request_latency"] for request in requests],
        tokens_per_s=sum(request["output_tokens"] for request in requests) / benchmark["duration"],
    )
    labels = content.get("config", {}).get("metadata", {}).get("labels", {})
    return figures, str(labels.get("origin", ""))


_READERS: dict[str, Callable[[Any], tuple[Figures, str]]] = {
    "vllm-bench": _vllm,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
}


def _figures(
    *,
    ttft_ms: Iterable[float | None],
    itl_ms: Iterable[float | None],
    e2e_ms: Iterable[float | None],
    tokens_per_s: float,
) -> Figures:
    """The measures that runs are compared by, where there are values of them."""
    medians = {"ttft_p50_ms": ttft_ms, "itl_p50_ms": itl_ms, "e2e_p50_ms": e2e_ms}
    known = {name: [float(value) for value in values if value is not None] for name, values in medians.items()}
    return {
        **{name: Value(quantile(values, 0.5)) for name, values in known.items() if values},
        "tokens_per_s": Value(float(tokens_per_s)),
    }
