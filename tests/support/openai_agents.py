"""Agents by openai-python, in the environment of the server: each sends a prompt, waits, and goes on from the answer.

One more sends ``ALONE`` requests before the others come, so that the steps of one request are seen too.
``python openai_agents.py URL AGENTS TURNS``. It imports nothing of the harness, which that environment does not have.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

ALONE = 2
ANSWER_TOKENS, MEAN_WAIT_S = 96, 0.05
NEW_TOKENS, IDS = (48, 16, 144, 80), (300, 1800)


def converse(client: Any, model: str, turns: int, number: int) -> None:
    """The requests of one agent."""
    drawn = random.Random(number)
    ids: list[int] = []
    for turn in range(turns):
        # A wait for a tool, and what it gives back.
        Event().wait(drawn.expovariate(1 / MEAN_WAIT_S))
        ids += [drawn.randrange(*IDS) for _ in range(NEW_TOKENS[turn % len(NEW_TOKENS)])]
        # Greedy: a model without weights repeats itself, so that drafts from the text before are accepted.
        more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(model=model, prompt=ids, max_tokens=ANSWER_TOKENS, extra_body=more)
        ids += answer.choices[0].token_ids


def main(url: str, agents: int, turns: int) -> None:
    """One agent alone, and then all the others at once."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    converse(client, model, ALONE, agents)
    with ThreadPoolExecutor(agents) as pool:
        list(pool.map(partial(converse, client, model, turns), range(agents)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
