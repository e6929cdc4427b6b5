"""pydantic-ai (PyPI ``pydantic-ai-slim``) against the scripted server: a tool that runs two agents at once, and a
second turn of a user; its spans go to a collector's file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.agents.scripted_server import FIRST, Answer, Script, ScriptedServer, ToolCall
from tests.support.agents.tool import offline, run_quietly
from tests.support.raw_server import Asked, RawServer, Reply, whole

NAME, LICENCE = "pydantic-ai", "MIT"
FORMAT = "otel"
IDS = ("traceId", "spanId", "parentSpanId")
PACKAGES = ("pydantic-ai-slim[openai]", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
PROGRAM = """
import asyncio, sys, time
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

trace.set_tracer_provider(provider := TracerProvider())
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
Agent.instrument_all()
model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none"))
helper = Agent(model, name="helper", instructions="You count files.")
main = Agent(model, name="main", instructions="You lead helpers.")

@helper.tool_plain
@main.tool_plain
async def step(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

@main.tool_plain
async def delegate(tasks: list[str]) -> list[str]:
    return [run.output for run in await asyncio.gather(*map(helper.run, tasks))]

async def play():
    await main.run("Say a word. script:first")
    first = await main.run("Let helpers count. script:main")
    await asyncio.sleep(3)
    await main.run("Once more. script:main", message_history=first.all_messages())

asyncio.run(play())
provider.shutdown()
"""


def step(seconds: float) -> ToolCall:
    """A tool of so many seconds."""
    return ToolCall("step", {"seconds": seconds})


def child(seconds: float) -> Script:
    """A helper with a tool of so many seconds."""
    answers = (Answer("I count.", (step(seconds),), "none"), Answer("There are 3 files."))
    return Script(answers, started_by="main")


HELPERS = ToolCall("delegate", {"tasks": ["Count here. script:child-one", "Count there. script:child-two"]})
SCRIPTS = {
    "first": FIRST,
    "main": Script(
        (
            Answer("I look around first.", (step(1.5),), "none", hidden_tokens=24),
            Answer("Two helpers count.", (HELPERS,)),
            Answer("Two things at once.", (step(0.9), step(1.6)), joins="child-one child-two"),
            Answer("The first part is done."),
            Answer("Once more.", (step(0.7),), "human"),
            Answer("All is done."),
        )
    ),
    "child-one": child(1.2),
    "child-two": child(2.1),
}


@contextmanager
def collecting(target: Path) -> Generator[str]:
    """The address to which an agent exports its spans: each export is a line of OTLP JSON, as a collector writes it."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def take(asked: Asked) -> Reply:
        body = gzip.decompress(asked.body) if asked.header("Content-Encoding") == "gzip" else asked.body
        document = with_ids_in_hex(json_format.MessageToDict(ExportTraceServiceRequest.FromString(body)))
        with target.open("a") as lines:
            lines.write(json.dumps(document) + "\n")
        return Reply([whole("{}", b"Content-Type: application/json")])

    with RawServer(take) as server:
        yield server.url


def with_ids_in_hex(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal; that of Protocol Buffers has them in base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(inner).hex() if key in IDS and isinstance(inner, str) else with_ids_in_hex(inner)
            for key, inner in value.items()
        }
    return list(map(with_ids_in_hex, value)) if isinstance(value, list) else value


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the file of spans."""
    spans = folder / "spans.jsonl"
    with collecting(spans) as url:
        command = [str(installed / "bin/python"), "-c", PROGRAM, server.url]
        run_quietly(command, cwd=folder / "work", env=offline(folder) | {"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    return [spans]
