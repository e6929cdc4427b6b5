"""What a server's tokenizer makes of prompts: the token ids that its model knows, and how many tokens words are.

Both come from the model's configuration or its tokenizer, else from some short requests. Prompts of token ids take the
ids of the plan; where the model knows fewer, they take those that it has. A server that the harness started is asked
for its tokenizer alone, so that its first request is the plan's.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.clock import ScaledClock
from harness.measure.client.prompts import RequestOptions, request_values
from harness.measure.client.run import replay_here
from harness.measure.client.target import Endpoint, Target
from harness.measure.server.ask import HTTP_OK, ask
from harness.model.plan.model import Plan, RequestPlan, SessionPlan, TokenIdRange
from harness.model.plan.tokens import TokenStreams
from harness.model.plan.words import WORDS, TextSizes
from harness.model.spec import ServerSpec, WorkloadSpec

USUAL_RANGE = WorkloadSpec().token_id_range
OUT_OF_VOCABULARY = "out of vocabulary"
CONFIG = "config.json"
DEADLINE_S = 10.0
# The last ids of a vocabulary, and its first, are often special tokens or single bytes.
MOST_LAST_IDS, LAST_SHARE, FIRST_SHARE = 1024, 16, 8
_vocabularies: dict[Endpoint, int] = {}


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
    try:
        home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()
        hub = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
    except RuntimeError:  # a user without a home folder has no cache
        return []
    return sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob(f"*/{CONFIG}"))


def _vocabulary_in(file: Path) -> int | None:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        # Models of text and pictures have a part for the text.
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def remember_vocabulary(endpoint: Endpoint, vocabulary: int | None) -> None:
    """Keep what a server said before the first run, for the runs of this process."""
    _vocabularies.pop(endpoint, None)
    if vocabulary is not None:
        _vocabularies[endpoint] = vocabulary


def remembered_vocabulary(endpoint: Endpoint) -> int | None:
    return _vocabularies.get(endpoint)


# vLLM's and SGLang's name of the text, llama.cpp's and TGI's.
TEXT_KEYS = ("prompt", "content", "inputs")
SEPARATOR = "\n"
TURN = " ".join(("", *WORDS[:16]))
SHORT_WORDS, MOST_WORDS, ANSWER_TOKENS = 32, 512, 4
# More than there are lengths of words, and two for what the fit must leave nothing of.
NUM_LONG = 12
# No tokenizer makes more of ten letters; what says so does not count tokens.
MOST_WORD_TOKENS = 32
OTHER_REPLICATE = 1 << 32
FloatArray = NDArray[np.float64]
_text_sizes: dict[tuple[Any, ...], TextSizes] = {}


def text_sizes_of(target: Target, plan: Plan, *, is_ours: bool) -> TextSizes:
    """The sizes of words at ``target`` for the plan's prompt form; nothing is asked for token ids.

    A server that somebody else started (``is_ours`` false) is asked once by this process, until ``forget_text_sizes``.
    """
    if plan.prompt_form == "token-ids":
        return TextSizes()
    if is_ours:
        return measure_text_sizes(target, plan, may_generate=False)
    key = target.endpoint, target.model, plan.prompt_form, target.request.model_dump_json()
    if key not in _text_sizes:
        _text_sizes[key] = measure_text_sizes(target, plan, may_generate=True)
    return _text_sizes[key]


def forget_text_sizes(endpoint: Endpoint) -> None:
    """Ask this server again: another one may listen there by now."""
    for key in [key for key in _text_sizes if key[0] == endpoint]:
        del _text_sizes[key]


def measure_text_sizes(target: Target, plan: Plan, *, may_generate: bool) -> TextSizes:
    """Ask the tokenizer, and where it does not answer a few requests (if allowed); one token a word without either."""
    sizes = _word_sizes(target)
    if sizes is not None and plan.prompt_form == "text":
        return sizes
    templated = None if sizes is None else _template_sizes(target, sizes)
    if templated is not None:
        return templated
    counted = _from_usage(target, plan, sizes) if may_generate else None
    return counted or (TextSizes() if sizes is None else replace(sizes, first_tokens=0))


def _word_sizes(target: Target) -> TextSizes | None:
    """Sizes of single words from one text that has each of them between two separators.

    None where nothing tokenizes, or where the tokens do not show the separators.
    """
    text = SEPARATOR.join(("", *(f" {word}" for word in WORDS), ""))
    ids = next((ids for key in TEXT_KEYS if (ids := _tokenized(target, {key: text}))), None)
    if ids is None:
        return None
    number_of = Counter(ids)
    for separator in (each for each, number in number_of.items() if number == len(WORDS) + 1):
        places = [place for place, each in enumerate(ids) if each == separator]
        sizes = tuple(float(end - start - 1) for start, end in pairwise(places))
        if min(sizes) >= 1 and max(sizes) <= MOST_WORD_TOKENS:
            return TextSizes("tokenize", sizes, first_tokens=places[0] + len(ids) - 1 - places[-1])
    return None


def _template_sizes(target: Target, sizes: TextSizes) -> TextSizes | None:
    """The sizes with what the chat template adds; None where the tokenizer takes no messages."""
    user, assistant = ({"role": role, "content": TURN} for role in ("user", "assistant"))
    first = _tokenized(target, {"messages": [user]})
    second = _tokenized(target, {"messages": [user, assistant, user]}) if first else None
    if first is None or second is None:
        return None
    words = round(sizes.tokens_of(TURN))
    return _with_template(sizes, len(first) - words, len(second) - len(first) - 2 * words)


def _with_template(sizes: TextSizes, first_tokens: float, turn_tokens: float) -> TextSizes:
    return replace(sizes, first_tokens=max(0, round(first_tokens)), turn_tokens=max(0, round(turn_tokens)))


def _tokenized(target: Target, body: dict[str, Any]) -> list[Any] | None:
    """The ids of what ``body`` holds; None where the server has no such tokenizer."""
    values = request_values(0, 0, ("tokenize-0", "tokenize-0-0"), None, (0, 0))
    headers = RequestOptions(target.request).headers(lambda: values)
    content = json.dumps({"model": target.model, **body}).encode()
    reply = ask(target.endpoint, "/tokenize", deadline_s=DEADLINE_S, body=content, headers=headers)
    answer: Any = reply.json() if reply.status == HTTP_OK else None
    ids: Any = answer.get("tokens") if isinstance(answer, dict) else answer
    if not isinstance(ids, list) or not ids:
        return None
    # TGI lists objects.
    plain = [each.get("id") if isinstance(each, dict) else each for each in ids]
    return plain if all(isinstance(each, int) for each in plain) else None


def _from_usage(target: Target, plan: Plan, known: TextSizes | None) -> TextSizes | None:
    """The sizes from the usage of a short and some longer prompts, and of a chat's second turn; None where one fails.

    known: sizes of words where these are known, so that only the template is measured.
    """
    longest = max(request.stream_tokens for request in plan.requests)
    # Many words, as their sizes vary. A token may be a byte: a word is then about six tokens, and must fit the server.
    num_long = max(2 * SHORT_WORDS, min(MOST_WORDS, longest // 8))
    asked = _plan_of((SHORT_WORDS, *[num_long] * (1 if known else NUM_LONG)), plan)
    # Scale 1: the time limit is one of wall time. No records: nothing of this is part of a run.
    here = replace(
        target,
        options=target.options.model_copy(update={"processes": 1}),
        clock=ScaledClock(1.0),
        request_timeout_ns=round(target.request_timeout_ns / target.clock.scale),
        records=None,
        is_strict=False,
        text_sizes=TextSizes(),
    )
    rows = replay_here(asked, here, on_event=None, is_stopped=lambda: False).requests.to_pylist()
    counts = {(row["session"], row["request"]): row["prompt_tokens"] for row in rows if row["status"] == "ok"}
    if len(counts) < len(rows) or not all(counts.values()):
        return None
    streams = TokenStreams(asked)
    texts = [streams.fresh_text(session, 0) for session in range(len(asked.sessions))]
    sizes = known or _fitted_sizes(texts, [counts[session, 0] for session in range(len(texts))])
    if max(sizes.word_tokens) > MOST_WORD_TOKENS:
        return None
    turn_tokens = 0.0
    if plan.prompt_form == "chat":
        last = len(texts) - 1
        more_tokens = counts[last, 1] - counts[last, 0] - ANSWER_TOKENS
        turn_tokens = more_tokens - sizes.tokens_of(streams.fresh_text(last, 1))
    return _with_template(sizes, counts[0, 0] - sizes.tokens_of(texts[0]), turn_tokens)


def _fitted_sizes(texts: Sequence[str], counted: Sequence[int]) -> TextSizes:
    """Sizes by the letters of a word: whole ones where these make every count exactly, else a mean of each length.

    texts: a short one, then longer ones. counted: tokens of each.
    """
    lengths = sorted({len(word) for word in WORDS})
    # Of each text: words of each length, and once what the server adds.
    numbers = np.array([[*_numbers(text, lengths), 1] for text in texts], dtype=np.float64)
    tokens = np.array(counted, dtype=np.float64)
    share = _share_of_letters(numbers[:, :-1], tokens, lengths)
    whole = np.round(np.linalg.lstsq(numbers, tokens, rcond=None)[0])
    if np.array_equal(numbers @ whole, tokens) and min(whole[:-1]) >= 1:
        of_length = dict(zip(lengths, whole[:-1].tolist(), strict=True))
    else:
        of_length = {length: round(1 + share * length, 4) for length in lengths}
    return TextSizes("usage", tuple(of_length[len(word)] for word in WORDS))


def _share_of_letters(numbers: FloatArray, tokens: FloatArray, lengths: Sequence[int]) -> float:
    """The share of its letters by which a word is more than one token: none where each word is a token, one for bytes.

    By all longer texts together against the first.
    """
    more = numbers[1:].sum(axis=0) - (len(numbers) - 1) * numbers[0]
    more_tokens = tokens[1:].sum() - (len(tokens) - 1) * tokens[0]
    return max(0.0, float((more_tokens - more.sum()) / (more @ np.array(lengths))))


def _numbers(text: str, lengths: Sequence[int]) -> list[int]:
    """How many words of each length a text has."""
    counts = Counter(map(len, text.split()))
    return [counts[length] for length in lengths]


def _plan_of(lengths: Sequence[int], plan: Plan) -> Plan:
    """A session each of one prompt of so many words, one after another; the last one of a chat has a second turn."""
    sessions: list[SessionPlan] = []
    for index, num_words in enumerate(lengths):
        requests = [RequestPlan(0, num_words, ANSWER_TOKENS, 0)]
        if plan.prompt_form == "chat" and index == len(lengths) - 1:
            requests.append(RequestPlan(num_words + ANSWER_TOKENS, SHORT_WORDS, ANSWER_TOKENS, 0))
        after = index - 1 if index else None
        sessions.append(SessionPlan(index, 0, after, None, tuple(requests)))
    # Another replicate draws other words, so that no prompt of the run is found in the server's cache.
    return replace(
        plan,
        source="text sizes",
        replicate=plan.replicate + OTHER_REPLICATE,
        shared_prefix_tokens=0,
        block_tokens=0,
        sessions=tuple(sessions),
    )
