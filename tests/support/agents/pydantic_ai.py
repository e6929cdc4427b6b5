"""pydantic-ai (PyPI ``pydantic-ai-slim``) against the scripted server: a tool that runs two agents at once, and a
second turn of a user; its spans go to a collector's file."""

from __future__ import annotations

from pathlib import Path

from tests.support.agents.collector import collecting
from tests.support.agents.scripted_server import FIRST, Answer, Script, ScriptedServer, ToolCall
from tests.support.agents.tool import offline, run_quietly

NAME, LICENCE = "pydantic-ai", "MIT"
FORMAT = "otel"
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


def run(installed: Path, folder: Path, server: ScriptedServer) -> list[Path]:
    """Play the scripts; returns the file of spans."""
    spans = folder / "spans.jsonl"
    with collecting(spans) as url:
        command = [str(installed / "bin/python"), "-c", PROGRAM, server.url]
        run_quietly(command, cwd=folder / "work", env=offline(folder) | {"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    return [spans]
