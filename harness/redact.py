"""Redaction: settings known to be harmless are recorded; the word "redacted" replaces all others.

A secret reaches the server and nothing else: manifests, frozen files and reports hold the word instead. The environment
is not read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from harness.errors import SpecError
from harness.secrets import REDACTED

# PASS also stands in PGPASS and PASSWORD; TOKENIZERS_PARALLELISM, AUTHOR and MAX_TOKENS are no secrets.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ|S(?:\b|_))|KEY|SECRET|PASS|CREDENTIAL|AUTH(?!ORS?(?:\b|_))|JWT|COOKIE|BEARER|SIGNATURE"
    r"|(?:^|[_-])PINS?(?:[_-]|$)",
    re.IGNORECASE,
)
# Families of variables whose values say how a stack computes. A name in them may still be a secret's: VLLM_API_KEY.
_HARMLESS_VARIABLE = re.compile(
    r"(?:VLLM|RBLN|PYTHON|OMP|MKL|OPENBLAS|NUMBA|TORCH|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|CUDA|LC|MALLOC|LD)_?[A-Z0-9_]*"
    r"|HF_(?:HOME|HUB_OFFLINE|HUB_CACHE|ENDPOINT|DATASETS_OFFLINE)|NO_COLOR|DO_NOT_TRACK|TMPDIR|PATH|LANG|TZ|HOME"
    r"|(?:HTTPS?|NO|ALL)_PROXY",
    re.IGNORECASE,
)
# Of `vllm serve` and of the harness's own commands: the options whose values are recorded.
_HARMLESS_OPTIONS_TEXT = """
    -m -o additional-config async-scheduling attention-backend backend block-size condition conditions config
    confirmatory context cost-model dry-run data-parallel-size device devices
    disable-log-requests distributed-executor-backend
    download-dir dtype enforce-eager experiment format generation-config gpu-memory-utilization hf-overrides host
    kv-cache-dtype kv-transfer-config limit-mm-per-prompt load-format log-level long-prefill-token-threshold
    max-log-len max-logprobs max-model-len max-num-active-seqs max-num-batched-tokens max-num-partial-prefills
    max-num-seqs max-parallel-loading-workers max-seq-len-to-capture max-tokens middleware model num-gpu-blocks-override
    num-lookahead-slots output override-generation-config pipeline-parallel-size port prediction-rules quantization
    reasoning-parser replicates report resume revision rope-scaling rope-theta rules runner runs scheduling-policy seed
    served-model-name shutdown-timeout silence-s speculative-config start-at stream-interval swap-space table
    task tensor-parallel-size timeout-keep-alive tokenizer tokenizer-mode tool-call-parser uvicorn-log-level
"""
_HARMLESS_OPTIONS = frozenset(_HARMLESS_OPTIONS_TEXT.split())
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*)(=.*)?", re.DOTALL)
# A subcommand, a module or a number of an option; a path. Any other bare word may be a secret.
_HARMLESS_WORD = re.compile(r"[a-z][a-z.-]{0,31}|(?:~|\.{1,2})?/[^\s?=:]*|[\w./-]+\.(?:toml|jsonl?|html|py|md|csv)|--?")
_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]+@")
_QUERY_OF_URL = re.compile(r"(?<=[?&;#])([\w.%-]+)=([^&;#\s\"']+)")
_AUTHORIZATION = re.compile(r"\b(bearer|basic|digest|token)(\s+)[^\s\"',}]+", re.IGNORECASE)
# From the start of a word on: a long one without an equals sign is read once, not once from each of its letters.
_NAMED_SECRET = re.compile(r"(?<![\w.-])([\w.-]+)(\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)")


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name is taken for a secret."""
    return _SECRET_NAME.search(name) is not None


def is_recorded(name: str) -> bool:
    """Whether the value of an environment variable is known to be harmless by its name."""
    return _HARMLESS_VARIABLE.fullmatch(name) is not None and not is_secret(name)


def redacted_text(text: str) -> str:
    """Free text without what is known to be a secret: users of URLs, their queries, authorizations, named secrets."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(redacted_value(json.loads(text), frozenset()))
        except (ValueError, RecursionError):
            return REDACTED
    text = _USER_OF_URL.sub(f"{REDACTED}@", text)
    text = _QUERY_OF_URL.sub(rf"\1={REDACTED}", text)
    text = _AUTHORIZATION.sub(rf"\1\2{REDACTED}", text)
    return _NAMED_SECRET.sub(lambda found: f"{found[1]}{found[2]}{REDACTED}" if is_secret(found[1]) else found[0], text)


def redacted_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a record: the value of a known harmless one, without the user of a URL."""
    return {name: redacted_text(str(value)) if is_recorded(name) else REDACTED for name, value in env.items()}


def redacted_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Command words for a record: options by name, values of known harmless ones, subcommands and paths."""
    kept: list[str] = []
    option = ""
    for word in words:
        found = _OPTION.fullmatch(word)
        if found is None or (option and not word.startswith("--")):
            kept.append(_redacted_word(word, option))
            option = ""
        elif found[2] is None and (word.startswith("--") or len(word) == 2):
            kept.append(word)
            option = word
        else:
            # "-pSECRET" is an option with its value.
            name, value = (found[1], found[2][1:]) if found[2] else (word[:2], word[2:])
            kept.append(f"{name}{'=' if found[2] else ''}{_redacted_word(value, name)}")
            option = ""
    return tuple(kept)


def _redacted_word(word: str, option: str) -> str:
    """One value or bare word. option: the option before it, "" where there is none or it needs no value."""
    if option:
        is_known = option in _HARMLESS_OPTIONS or option.lstrip("-") in _HARMLESS_OPTIONS
        is_kept = is_known and not is_secret(option)
    else:
        is_kept = _HARMLESS_WORD.fullmatch(word) is not None
    return redacted_text(word) if is_kept else REDACTED


def redacted_value(value: Any, known: frozenset[str], name: str = "") -> Any:
    """A parsed TOML or JSON value for a record. known: the keys whose text is harmless; name: the key it stands under.

    Numbers stay, unless their key names a secret; text stays under a known key; ``env``, ``extra_args`` and
    ``command`` go by their own rules.
    """
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        if name == "env":
            return redacted_env(table)
        return {key: redacted_value(one, known, key) for key, one in table.items()}
    if isinstance(value, list | tuple):
        items = cast("Iterable[Any]", value)
        if name in ("extra_args", "command"):
            return list(redacted_arguments([str(one) for one in items]))
        return [redacted_value(one, known, name) for one in items]
    if name in known and isinstance(value, str):
        return redacted_text(value)
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain and (name in known or not is_secret(name)) else REDACTED


def filled_env(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a server that is about to start: what was redacted in a record comes from ``own``, by its name.

    Raises SpecError naming a variable that is not there.
    """
    filled: dict[str, str] = {}
    for name, value in env.items():
        if value == REDACTED:
            if name not in own:
                raise SpecError(
                    "was redacted as what may be secret is in every record, and is not in the environment",
                    where=f"server.env.{name}",
                    hint=f"export {name} and run again",
                )
            value = own[name]
        filled[name] = value
    return filled
