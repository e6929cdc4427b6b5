"""The token ids that a server's model knows: from its configuration, or by asking a server that runs.

Prompts of token ids take the ids of the plan; where the model knows fewer, they take those that it has.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.measure.client.request_options import RequestOptions, request_values
from harness.measure.client.target import Endpoint
from harness.measure.server.ask import HTTP_OK, ask
from harness.model.plan.model import TokenIdRange
from harness.model.spec import RequestSpec, ServerSpec, WorkloadSpec

USUAL_RANGE = WorkloadSpec().token_id_range
OUT_OF_VOCABULARY = "out of vocabulary"
CONFIG = "config.json"
DEADLINE_S = 10.0
# The last ids of a vocabulary, and its first, are often special tokens or single bytes.
MOST_LAST_IDS, LAST_SHARE, FIRST_SHARE = 1024, 16, 8
_of_servers: dict[Endpoint, int] = {}


def range_within(vocabulary: int | None, wanted: TokenIdRange) -> TokenIdRange | None:
    """The ids that prompts take where the model does not have all of the usual ones; None: those of the plan.

    A range that a person wrote is taken as it is. vocabulary: number of ids; None: unknown.
    """
    if vocabulary is None or vocabulary >= wanted[1] or wanted != USUAL_RANGE:
        return None
    high = vocabulary - min(MOST_LAST_IDS, vocabulary // LAST_SHARE)
    return min(wanted[0], high // FIRST_SHARE), high


def configured_vocabulary(server: ServerSpec) -> int | None:
    """The number of ids in the configuration of the model that a server of ours is started with; None: not found.

    The model is a folder of this host, or one that lies in the cache of the Hugging Face hub.
    """
    name = server.artifact or server.model
    if not name or server.ssh:
        return None
    files = [Path(name) / CONFIG, *_in_hub(name, server)]
    return next((size for file in files if (size := _vocabulary_in(file))), None)


def _in_hub(name: str, server: ServerSpec) -> list[Path]:
    """Source: huggingface_hub, constants.py and file_download.py (repo_folder_name)."""
    env = {**os.environ, **server.env}
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob(f"*/{CONFIG}"))


def _vocabulary_in(file: Path) -> int | None:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        # Models of text and pictures have a part for the text.
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def asked_vocabulary(endpoint: Endpoint, model: str, request: RequestSpec, refused: int) -> int | None:
    """The smallest id that a running server calls out of its vocabulary; None where it says something else.

    Halves the ids below ``refused`` by requests of one token, of which a refused one costs no step.
    """
    options = RequestOptions(request)
    values = request_values(0, 0, ("vocabulary-0", "vocabulary-0-0"), None, (1, 1))
    headers, more = options.headers(lambda: values), options.body(lambda: values).decode()
    known, unknown = 0, refused
    while unknown - known > 1:
        middle = (known + unknown) // 2
        length = options.length_key.decode()
        content = f'{{"model":{json.dumps(model)},"prompt":[{middle}],"{length}":1{more}}}'
        reply = ask(endpoint, "/v1/completions", deadline_s=DEADLINE_S, body=content.encode(), headers=headers)
        if reply.status == HTTP_OK:
            known = middle
        elif OUT_OF_VOCABULARY.encode() in reply.body:
            unknown = middle
        else:
            return None
    return unknown if known else None


def remember(endpoint: Endpoint, vocabulary: int | None) -> None:
    """Keep what a server said before the first run, for the runs of this process."""
    _of_servers.pop(endpoint, None)
    if vocabulary is not None:
        _of_servers[endpoint] = vocabulary


def remembered(endpoint: Endpoint) -> int | None:
    return _of_servers.get(endpoint)
