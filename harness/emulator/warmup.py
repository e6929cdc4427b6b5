"""Compile and load everything a step needs before the server says it is ready.

The engine's functions are compiled on their first call, which may take seconds: in a measurement that would be one
endless step. No object made here outlives the call.
"""

from __future__ import annotations

import numpy as np

from harness.emulator.core import EngineRequest
from harness.emulator.responses import Answer
from harness.emulator.tokens import ContextHash, TokenArray, decode
from harness.engine import EngineConfig, Scheduler, load_cost_model
from harness.plan import token_block_keys
from harness.spec import ServerSpec
from harness.stack.rbln.dialect import dialect_of
from harness.stack.rbln.kv_rules import NEWEST_STABLE, RULE_SETS

PROMPT_TOKENS = 300


def warm_up(server: ServerSpec) -> None:
    """Run a prefill, an abort, two decode steps and their answers on a scheduler of their own."""
    scheduler = Scheduler(EngineConfig.from_server(server), load_cost_model(server.cost_model), with_events=True)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    keys = token_block_keys(prompt)
    for handle in range(2):
        scheduler.submit(handle, len(prompt), 3, keys)
    scheduler.schedule()
    scheduler.finish_step()
    scheduler.abort(1)
    while scheduler.has_work:
        scheduler.schedule()
        scheduler.finish_step()
    scheduler.take_kv_events()
    _speak(prompt)


def _speak(prompt: TokenArray) -> None:
    context = ContextHash.of(prompt, 0)
    token = context.after(context.next_token()).next_token()
    request = EngineRequest(0, "", "", prompt, 1, np.zeros(0, dtype=np.int64), context, 1)
    for is_chat in (False, True):
        answer = Answer(dialect_of(RULE_SETS[NEWEST_STABLE]), "", 0, "", is_chat, [request], include_usage=True)
        answer.chunk(0, decode([token]), [token], 1)
        answer.last_chunk(1)
