"""Plays the twin's own arrivals to the emulator's core, at their true times, and compares every decision.

What the server saw comes from the stand-in's trace: when each request entered the scheduler's queue, was dropped, and
when each step was scheduled. Nothing is told to the core about whom to admit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.measure.emulator.logs import kv_event_line
from harness.model.engine import DECODE, EngineConfig, KvEvent, Scheduler, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest, StepStart
from harness.model.plan.blocks import token_block_keys

MESSAGE = re.compile(r"(\[(?:PFX|BUCKET)\] .*)$")


@dataclass
class Followed:
    """How many decisions were compared, all of them equal unless ``difference`` says which was the first that is not.

    steps: schedule() calls. admissions: who, and how many tokens were reused. queued_admissions: of requests that a
    full batch kept waiting, so that their order was the scheduler's to choose. reuses: admissions with reuse.
    false_hits: admissions for which the hash map promised more than was reused. lines: of the server's log.
    """

    steps: int = 0
    admissions: int = 0
    queued_admissions: int = 0
    reuses: int = 0
    false_hits: int = 0
    evictions: int = 0
    decodes: int = 0
    arrivals: int = 0
    aborts: int = 0
    lines: int = 0
    difference: str = ""

    def text(self) -> str:
        """One line for people."""
        return ", ".join(
            f"{value} {name.replace('_', ' ')}" for name, value in vars(self).items() if name != "difference"
        )


@dataclass(frozen=True)
class Asked:
    """What a client sent: the tokens of its prompt and how many it wants back."""

    prompt: list[int]
    max_tokens: int


def log_messages(log: str) -> list[str]:
    """The messages about KV memory and buckets, in the order the engine process wrote them."""
    return [match[1] for line in log.splitlines() if (match := MESSAGE.search(line))]


def follow(
    trace: list[dict[str, Any]], messages: list[str], config: EngineConfig, asked: Callable[[str], Asked]
) -> Followed:
    """Compare every step of ``trace`` and every one of ``messages``. asked: what the request of an engine id asked."""
    follower = _Follower(EngineCore(Scheduler(config, load_cost_model("paper"))), messages, asked)
    try:
        for record in trace:
            follower.take(record)
        follower.end_step()
        follower.expect(len(messages), follower.at, "messages of the log")
    except _Differs as difference:
        follower.seen.difference = str(difference)
    return follower.seen


class _Differs(Exception):  # noqa: N818 - a finding, not a fault
    """The first decision that is not the server's."""


@dataclass
class _Follower:
    core: EngineCore
    messages: list[str]
    asked: Callable[[str], Asked]
    seen: Followed = field(default_factory=Followed)
    at: int = 0
    handles: dict[str, int] = field(default_factory=dict[str, int])
    running: StepStart | None = None
    waited: set[str] = field(default_factory=set[str])

    def take(self, record: Mapping[str, Any]) -> None:
        """One record of the trace."""
        match record["kind"]:
            case "arrival":
                self._arrives(record)
            case "abort":
                if record["step"] is None:
                    self.end_step()
                for name in record["requests"]:
                    self.core.abort(self.handles[name], 0)
                    self.seen.aborts += 1
            case "schedule":
                self.end_step()
                self._start_step(record)
            case "decode":
                start = self.running
                step = None if start is None else start.step
                bucket = None if step is None or step.kind != DECODE else (step.num_seqs, step.bucket)
                self.expect((record["n"], record["b"]), bucket, "decode step on the device")
                self.seen.decodes += 1
            case _:
                pass

    def _arrives(self, record: Mapping[str, Any]) -> None:
        name, asked = record["request"], self.asked(record["request"])
        self.expect(record["prompt_tokens"], len(asked.prompt), f"prompt tokens of {name}")
        prompt = np.asarray(asked.prompt, dtype=np.int32)
        handle = self.core.new_handle()
        self.handles[name] = handle
        request = EngineRequest(
            handle=handle,
            engine_id=name,
            external_id=name,
            prompt=prompt,
            max_tokens=asked.max_tokens,
            block_keys=token_block_keys(prompt),
            planned_tokens=asked.max_tokens,
            arrival_ns=record["start_ns"],
        )
        self.core.submit(request)
        self.seen.arrivals += 1

    def _start_step(self, record: Mapping[str, Any]) -> None:
        start = self.running = self.core.start_step(record["start_ns"])
        step = None if start is None else start.step
        names = [] if start is None else [request.engine_id for request in start.requests]
        what = f"schedule() number {record['call']}"
        self.expect(record["requests"], names, f"requests of {what}")
        self.expect(record["running"], self._names(self.core.scheduler.running), f"running after {what}")
        self.expect(record["waiting"], self._names(self.core.scheduler.waiting), f"waiting after {what}")
        self.expect(record["cached_tokens"], 0 if step is None else step.cached_tokens, f"reused tokens of {what}")
        self.seen.steps += 1
        if len(record["running"]) == self.core.scheduler.config.max_num_seqs:
            self.waited.update(record["waiting"])
        if start is None or step is None:
            return
        if step.kind == "PREFILL":
            self.seen.admissions += 1
            self.seen.queued_admissions += names[0] in self.waited
            self.seen.reuses += step.cached_tokens > 0
            self.seen.false_hits += step.hash_hit_tokens > step.cached_tokens
        lines = [self._line(event) for event in (*start.kv_events_before, *step.kv_events)]
        if step.kind == DECODE:
            lines.append(f"[BUCKET] request_nums={step.num_seqs} padded_batch_size={step.bucket}")
        self._compare(lines)

    def end_step(self) -> None:
        """The step that runs, if any, is over."""
        if self.core.running_step is not None:
            self._compare([self._line(event) for event in self.core.end_step().kv_events])

    def _compare(self, lines: list[str]) -> None:
        for line in lines:
            theirs = self.messages[self.at] if self.at < len(self.messages) else "(end of the log)"
            self.expect(theirs, line, f"message {self.at}")
            self.at += 1
            self.seen.lines += 1
            self.seen.evictions += "[EVICTION]" in line

    def expect(self, theirs: object, ours: object, what: str) -> None:
        """Raise unless the server's value is ours."""
        if theirs != ours:
            raise _Differs(f"{what}: server {theirs!r}, engine {ours!r}")

    def _names(self, handles: tuple[int, ...]) -> list[str]:
        names = {handle: name for name, handle in self.handles.items()}
        return [names[handle] for handle in handles]

    def _line(self, event: KvEvent) -> str:
        name = self._names((event.request,))[0] if event.request >= 0 else ""
        return kv_event_line(event, name)[1]
