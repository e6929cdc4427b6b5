"""This harness and other load generators before the same server, each held to a proxy that stamps what passes.

``python -m benchmarks.generators --aiperf ENV --guidellm ENV --inference-perf ENV --vllm ENV [--server URL]``. ENV is
the folder of an environment where the tool is installed; nothing is installed here. Each sends 40 requests, 4 at a
time, and its own figures stand beside the wire's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.emulator import wait_for_address
from benchmarks.wire import Seen, wire
from harness.analysis.serving import latencies
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import HarnessError, SpecError
from harness.measure.records.store import RunStore
from harness.runner.backends.emulator import EMULATED_MODEL

NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, ANSWER_TOKENS = 40, 4, 200, 64
TIMEOUT_S = 300.0
MS_PER_S = 1000.0
END_WITHIN_S = 20


class Reported(NamedTuple):
    """What a tool says: means over the requests, ms; tokens per second of the whole. None: it has no such figure."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    tokens_per_s: float | None


class Task(NamedTuple):
    """The options of each tool. folder: where it writes."""

    url: str
    model: str
    tokenizer: Path
    folder: Path


class Tool(NamedTuple):
    """A load generator. program: its command in an environment; "": this harness. reported: reads what it wrote."""

    name: str
    program: str
    command: Callable[[Task], list[str]]
    reported: Callable[[Path], Reported]


class Row(NamedTuple):
    """One tool in one repetition. apart: of what it reports, less the wire's; cpu_s: of it and all its processes."""

    ttft_apart_ms: float
    tpot_apart_ms: float | None
    e2e_apart_ms: float
    tokens_per_s_apart: float | None
    cpu_s: float
    wire_tokens_per_s: float


# -- the tools ------------------------------------------------------------------------------------------------------


def _harness_command(task: Task) -> list[str]:
    spec = task.folder / "generators.toml"
    spec.write_text(
        f"""name = "generators"
backend = "attached"
replicates = 1
base_seed = 1
[workload]
num_sessions = {NUM_REQUESTS}
requests_per_session = 1
concurrency = {CONCURRENCY}
waits = "none"
prompt_tokens = {{distribution = "fixed", value = {PROMPT_TOKENS}}}
generate_tokens = {{distribution = "fixed", value = {ANSWER_TOKENS}}}
[server]
url = "{task.url}"
[limits]
schedule_moved_share = 1.0
[[condition]]
name = "base"
"""
    )
    return ["-m", "harness", "run", str(spec), "--runs", str(task.folder / "runs")]


def _harness_reported(folder: Path) -> Reported:
    (run,) = RunStore(folder / "runs").sealed("generators")
    of_run = latencies(run)
    ttft_ns, tpot_ns, e2e_ns = (statistics.fmean(each) for each in (of_run.ttft_ns, of_run.tpot_ns, of_run.e2e_ns))
    rate = int(of_run.tokens.sum()) / of_run.span_ns * NS_PER_S
    return Reported(ttft_ns / NS_PER_MS, tpot_ns / NS_PER_MS, e2e_ns / NS_PER_MS, rate)


def _vllm_command(task: Task) -> list[str]:
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", task.url, "--model", task.model),
        *("--tokenizer", str(task.tokenizer), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)),
        *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY), "--request-rate", "inf"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"),
        *("--result-dir", str(task.folder), "--result-filename", "result.json"),
    ]


def _vllm_reported(folder: Path) -> Reported:
    result = json.loads((folder / "result.json").read_text())
    ttft_ms, tpot_ms, e2e_ms = (float(result[f"mean_{name}_ms"]) for name in ("ttft", "tpot", "e2el"))
    return Reported(ttft_ms, tpot_ms, e2e_ms, float(result["output_throughput"]))


def _aiperf_command(task: Task) -> list[str]:
    return [
        *("profile", "--model", task.model, "--endpoint-type", "completions", "--streaming", "--url", task.url),
        *("--tokenizer", str(task.tokenizer), "--concurrency", str(CONCURRENCY)),
        *("--request-count", str(NUM_REQUESTS), "--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS)),
        *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--artifact-dir", str(task.folder / "aiperf")),
    ]


def _aiperf_reported(folder: Path) -> Reported:
    result = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    names = ("time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput")
    ttft_ms, tpot_ms, e2e_ms, rate = (float(result[name]["avg"]) for name in names)
    return Reported(ttft_ms, tpot_ms, e2e_ms, rate)


def _guidellm_command(task: Task) -> list[str]:
    target = f"kind=openai_http,target={task.url},model={task.model},request_format=/v1/completions"
    return [
        *("run", "--backend", target, "--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={task.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--disable-progress", "--output", f"kind=json,path={task.folder / 'guidellm.json'}"),
    ]


def _guidellm_reported(folder: Path) -> Reported:
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    figures = benchmark["metrics"]
    mean = {
        name: float(figures[name]["successful"]["mean"])
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "output_tokens_per_second")
    }
    ttft_ms, tpot_ms, e2e_s, rate = mean.values()
    return Reported(ttft_ms, tpot_ms, MS_PER_S * e2e_s, rate)


def _inference_perf_command(task: Task) -> list[str]:
    def length(tokens: int) -> dict[str, int]:
        return {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": NUM_REQUESTS}

    # JSON is YAML too.
    config = task.folder / "config.yml"
    settings: dict[str, Any] = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": length(PROMPT_TOKENS),
            "output_distribution": length(ANSWER_TOKENS),
        },
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "stages": [{"num_requests": NUM_REQUESTS, "concurrency_level": CONCURRENCY}],
        },
        "server": {"type": "vllm", "model_name": task.model, "base_url": task.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(task.tokenizer)},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": False}},
        "storage": {"local_storage": {"path": str(task.folder / "reports")}},
    }
    config.write_text(json.dumps(settings))
    return ["--config_file", str(config)]


def _inference_perf_reported(folder: Path) -> Reported:
    times = json.loads(next(folder.rglob("summary_lifecycle_metrics.json")).read_text())["successes"]["latency"]
    ttft_ms, e2e_ms = (MS_PER_S * float(times[name]["mean"]) for name in ("time_to_first_token", "request_latency"))
    # It divides by the tokens of the text, which are those of the server with the tokenizer of its model alone.
    return Reported(ttft_ms, None, e2e_ms, None)


HARNESS = Tool("this harness", "", _harness_command, _harness_reported)
TOOLS = {
    "aiperf": Tool("AIPerf", "aiperf", _aiperf_command, _aiperf_reported),
    "guidellm": Tool("GuideLLM", "guidellm", _guidellm_command, _guidellm_reported),
    "inference-perf": Tool("inference-perf", "inference-perf", _inference_perf_command, _inference_perf_reported),
    "vllm": Tool("vllm bench serve", "vllm", _vllm_command, _vllm_reported),
}


def program_of(tool: Tool, environment: Path) -> list[str]:
    """The tool's command in an environment; SpecError where it is not installed there."""
    program = environment / "bin" / tool.program
    if not program.is_file():
        raise SpecError(
            f"{tool.name} is not installed there: {program} is missing",
            where=str(environment),
            hint=f"Make the environment: python -m venv {environment} && {environment}/bin/pip install {tool.program}",
        )
    return [str(program)]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of printable ASCII letters, in the form that transformers read: any ids of it are a text of as many
    tokens, which generators of random prompts need.
    """
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = "<|end|>"
    vocabulary = {text: place for place, text in enumerate([end, *map(chr, range(33, 127))])}
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{**added, "id": 0, "content": end, "special": True}],
        "pre_tokenizer": letters,
        "decoder": letters,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "pad_token": end}
    # Without a model's type some tools look for one elsewhere.
    config = {"model_type": "llama", "vocab_size": len(vocabulary)}
    for name, table in (("tokenizer", content), ("tokenizer_config", settings), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(table) + "\n", encoding="utf-8")


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(tool: Tool, program: list[str], server_url: str, model: str, tokenizer: Path) -> Row:
    """One tool before the server, beside the wire. Raises SpecError when it fails or sends fewer requests."""
    with tempfile.TemporaryDirectory(prefix="generators-") as name:
        folder = Path(name)
        with wire(server_url) as proxy:
            command = [*program, *tool.command(Task(proxy.url, model, tokenizer, folder))]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ended = _ended(command, folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen = proxy.seen(ANSWER_TOKENS)[-NUM_REQUESTS:]
        if ended.returncode or len(seen) < NUM_REQUESTS:
            last = [*(ended.stderr or ended.stdout).strip().splitlines(), "it printed nothing"][-2:]
            raise SpecError(
                f"ended with exit code {ended.returncode} after {len(seen)} of {NUM_REQUESTS} requests: {last[0]}",
                where=tool.name,
                hint=f"Run it by hand: {' '.join(command)}",
            )
        reported = tool.reported(folder)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return beside_wire(reported, seen, cpu_s)


def _ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # No tool may look for a tokenizer or a data set elsewhere.
    offline = {"VLLM_NO_USAGE_STATS": "1"}
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        env={**os.environ, **offline},
        cwd=folder if command[1:2] != ["-m"] else None,
    )


def beside_wire(reported: Reported, seen: Sequence[Seen], cpu_s: float) -> Row:
    """What a tool reports less what the wire saw of the same requests."""
    ttft_ms, tpot_ms, e2e_ms = (
        statistics.fmean(getattr(each, name) for each in seen) for name in ("ttft_ms", "tpot_ms", "e2e_ms")
    )
    span_ns = max(each.ended_ns for each in seen) - min(each.arrived_ns for each in seen)
    rate = sum(len(each.token_ns) for each in seen) / span_ns * NS_PER_S
    return Row(
        ttft_apart_ms=reported.ttft_ms - ttft_ms,
        tpot_apart_ms=None if reported.tpot_ms is None else reported.tpot_ms - tpot_ms,
        e2e_apart_ms=reported.e2e_ms - e2e_ms,
        tokens_per_s_apart=None if reported.tokens_per_s is None else reported.tokens_per_s - rate,
        cpu_s=cpu_s,
        wire_tokens_per_s=rate,
    )


COLUMNS = {
    "TTFT less the wire's [ms]": "ttft_apart_ms",
    "TPOT less the wire's [ms]": "tpot_apart_ms",
    "E2E less the wire's [ms]": "e2e_apart_ms",
    "tokens/s less the wire's": "tokens_per_s_apart",
    "CPU [s]": "cpu_s",
    "tokens/s that the server made": "wire_tokens_per_s",
}


def to_markdown(rows: dict[str, list[Row]]) -> str:
    """Median and range over the repetitions, a row for each tool."""
    lines = [f"| client | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    for name, repetitions in rows.items():
        cells = [_cell([getattr(row, column) for row in repetitions]) for column in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle, low, high = (f"{value:.3g}" for value in (statistics.median(known), min(known), max(known)))
    return f"{middle} [{low} .. {high}]"


@contextmanager
def emulator(folder: Path) -> Generator[str]:
    """The URL of an emulator that runs until the block ends."""
    config, log = folder / "config.json", folder / "server.log"
    table: dict[str, Any] = {"port": 0, "time_scale": 1.0, "server": {"kv_slots": 64}}
    config.write_text(json.dumps(table))
    command = [sys.executable, "-m", "harness.measure.emulator", "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield wait_for_address(process, log)
    finally:
        process.terminate()
        process.wait(END_WITHIN_S)


@contextmanager
def _server(url: str) -> Generator[str]:
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="generators-server-") as name, emulator(Path(name)) as started:
        yield started


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generators", description=__doc__)
    for name, tool in TOOLS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="ENV", help=f"environment with {tool.name}")
    parser.add_argument("--server", default="", metavar="URL", help="a server that runs; default: the emulator")
    parser.add_argument("--model", default=EMULATED_MODEL, help="its model")
    parser.add_argument("--repetitions", type=int, default=3)
    chosen = parser.parse_args(words)
    programs = {HARNESS: [sys.executable]}
    for name, tool in TOOLS.items():
        if (environment := getattr(chosen, name.replace("-", "_"))) is not None:
            programs[tool] = program_of(tool, environment.absolute())
    rows: dict[str, list[Row]] = {tool.name: [] for tool in programs}
    with _server(chosen.server) as url, tempfile.TemporaryDirectory(prefix="tokenizer-") as tokenizer:
        write_tokenizer(Path(tokenizer))
        for _ in range(chosen.repetitions):
            for tool, program in programs.items():
                rows[tool.name].append(measure(tool, program, url, chosen.model, Path(tokenizer)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}, {platform.release()}"
    what = f"{NUM_REQUESTS} requests, {CONCURRENCY} at a time, {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens"
    sys.stdout.write(f"{what}; median and range of {chosen.repetitions}. {machine}.\n\n{to_markdown(rows)}\n")


if __name__ == "__main__":
    try:
        main()
    except HarnessError as error:
        sys.stderr.write(f"benchmarks.generators: {error}\n")
        sys.exit(int(error.exit_code))
