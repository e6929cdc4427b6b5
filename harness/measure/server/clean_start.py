"""How a run on a server that is not restarted keeps what earlier runs left in its prefix cache out of its prompts.

Prompts of the run's own always; a cache salt and an empty cache where the server offers them.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from harness.measure.client.prompts import RequestOptions, request_values
from harness.measure.client.target import Target
from harness.measure.server.ask import HTTP_OK, Reply, ask

# Any JSON reader keeps an integer of this size.
SEED_BITS = 48
DEADLINE_S = 10.0
SALT = "cache_salt"
SCHEMA, RESET = "/openapi.json", "/reset_prefix_cache"


def clean_start(target: Target) -> tuple[Target, dict[str, Any]]:
    """The target of a run with prompts of its own, and what was done, for the manifest.

    The seed is new for every run: the same experiment may have been run on this server before. Source of the salt and
    of the reset: vLLM 0.30.0, entrypoints/openai/completion/protocol.py, entrypoints/serve/cache/api_router.py.
    """
    seed = secrets.randbits(SEED_BITS)
    fresh = replace(target, prompt_ids=target.prompt_ids._replace(seed=seed))
    was_reset = _asked(target, RESET, b"{}").status == HTTP_OK
    salt = ""
    if SALT not in target.request.extra_body and _knows_salt(target):
        salt = f"{seed:012x}"
        body = {**target.request.extra_body, SALT: salt}
        fresh = replace(fresh, request=target.request.model_copy(update={"extra_body": body}))
    return fresh, {"cache_salt": salt, "cache_reset": was_reset}


def _knows_salt(target: Target) -> bool:
    """Whether the server's own description of its requests has the key; others may refuse a key that they lack."""
    reply = _asked(target, SCHEMA)
    return reply.status == HTTP_OK and f'"{SALT}"'.encode() in reply.body


def _asked(target: Target, path: str, body: bytes | None = None) -> Reply:
    headers = RequestOptions(target.request).headers(
        lambda: request_values(0, 0, ("clean-0", "clean-0-0"), None, (0, 0))
    )
    return ask(target.endpoint, path, deadline_s=DEADLINE_S, body=body, headers=headers)
