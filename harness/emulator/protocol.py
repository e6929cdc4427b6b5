"""Requests, checked as vLLM checks them, and the error bodies of wrong requests.

The texts of errors are recorded in ``recorded/refusals.json``. Unknown fields are allowed and ignored, as in vLLM.
Nothing here touches the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from math import inf
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.emulator.model import MOST_LOGPROBS, VOCAB_SIZE, WantedLogprobs, chat_prompt, encode
from harness.emulator.recorded import recorded
from harness.stack.rbln.rules.dialect import Dialect

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EchoMode = Literal["", "before", "alone"]
TokenId = Annotated[int, Field(ge=0)]
Fault = tuple[str, Any]
"""A recorded refusal by name, and the value that it shows."""
MISSING_BODY = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
GREEDY_BELOW = 1e-5  # vllm/sampling_params.py, _SAMPLING_EPS


class ApiError(Exception):
    """A request that gets an error body. newer: type and param in releases that name the wrong field."""

    def __init__(self, message: str, kind: str, param: str | None, status: int, newer: Fault | None = None) -> None:
        super().__init__(message)
        self.message, self.kind, self.param, self.status, self.newer = message, kind, param, status, newer

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """vLLM's ErrorResponse."""
        kind, param = self.newer if self.newer and dialect.names_fields else (self.kind, self.param)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.status}}


def refusal(name: str | dict[str, Any], **values: Any) -> ApiError:
    """The recorded refusal ``name``, or that of a row, with ``values`` in its text."""
    entry: dict[str, Any] = recorded("refusals")[name] if isinstance(name, str) else name
    param: str | None = entry.get("param")
    return ApiError(
        entry["message"].format(**values),
        entry.get("type", "BadRequestError"),
        None if param is None else param.format(**values),
        entry.get("code", HTTPStatus.BAD_REQUEST.value),
        entry.get("newer"),
    )


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _GenerationRequest(BaseModel):
    """The fields of both endpoints. Fields that the emulator ignores are checked too."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    n: int | None = 1
    presence_penalty: float | None = 0.0
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | list[str] | None = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        """Wrong combinations of fields; vLLM checks these before the types."""
        if data.get("stream_options") and not data.get("stream"):
            yield "stream_options without stream", None
        if data.get("stream") and (data.get("prompt_logprobs") or 0) != 0:
            yield "prompt_logprobs in a stream", None
        salt = data.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            yield "cache_salt", None

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    add_special_tokens: bool = True
    request_id: str = ""

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        num_top = data.get("logprobs")
        if isinstance(num_top, int) and num_top < 0:
            yield "logprobs negative", num_top
        if data.get("prompt") in (None, ""):
            yield "prompt missing", None
        yield from super().faults(data)

    @property
    def output_limit(self) -> tuple[int | None, str]:
        # With ``echo`` nothing need be generated; vLLM then generates one token and does not show it.
        return (1 if self.echo_mode == "alone" else self.max_tokens), "max_tokens"

    @property
    def echo_mode(self) -> EchoMode:
        """Whether the prompt stands before the answer, or is all of it."""
        return "" if not self.echo else "alone" if self.max_tokens == 0 else "before"

    @property
    def wanted_logprobs(self) -> WantedLogprobs | None:
        if self.logprobs is None:
            return None
        return WantedLogprobs(self.logprobs, is_chat=False, as_ids=bool(self.return_tokens_as_token_ids))

    def prompts(self) -> list[list[int]]:
        """Token ids of every prompt in the request."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [encode(prompt)]
        if not prompt:
            raise refusal("no prompt")
        if isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]  # a list of int, by the field's own check
        return [encode(part) if isinstance(part, str) else part for part in prompt]  # pyright: ignore[reportReturnType]


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = "text"
    text: str = ""


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[ContentPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = "none"
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    request_id: str = ""

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("tools") == []:
            yield "no tools", None
        num_top = data.get("top_logprobs")
        if isinstance(num_top, int) and not isinstance(num_top, bool):
            if num_top < -1:
                yield "top_logprobs negative", num_top
            if num_top != 0 and not data.get("logprobs"):
                yield "top_logprobs alone", None
        if data.get("tool_choice") not in (None, "none") and data.get("tools") is None:
            yield "tool_choice without tools", None
        yield from super().faults(data)

    @property
    def output_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def wanted_logprobs(self) -> WantedLogprobs | None:
        if not self.logprobs or self.top_logprobs is None:
            return None
        num_top = VOCAB_SIZE if self.top_logprobs == -1 else self.top_logprobs
        return WantedLogprobs(num_top, is_chat=True, as_ids=bool(self.return_tokens_as_token_ids))

    def prompts(self) -> list[list[int]]:
        """Token ids of the templated conversation."""
        if not self.messages:
            raise refusal("no messages")
        turns = [(message.role, message.text) for message in self.messages]
        return [encode(chat_prompt(turns, add_generation_prompt=self.add_generation_prompt))]


AnyRequest = CompletionRequest | ChatRequest
RequestT = TypeVar("RequestT", bound=AnyRequest)


def check_supported(request: AnyRequest) -> None:
    """Refuse what vLLM does and the emulator does not, so that no difference stays unnoticed.

    With vllm-rbln 0.11.1 ``prompt_logprobs``, and ``echo`` with ``logprobs``, end the engine.
    """
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise refusal("not emulated", value="echo with logprobs", param="logprobs")
    if request.prompt_logprobs is not None:
        raise refusal("not emulated", value="prompt_logprobs", param="prompt_logprobs")
    if isinstance(request, ChatRequest) and request.tools is not None and request.tool_choice != "none":
        raise refusal("tool choice")


def parse_request(kind: type[RequestT], body: bytes, content_type: str) -> RequestT:
    """The request in an HTTP body; raises ApiError shaped like vLLM's validation handler."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise refusal("media type")
    data = _json(body)
    if not isinstance(data, dict):
        # A defect of vLLM 0.22 that clients can see: its validators call ``get`` before anyone checks the type.
        raise refusal("not an object", value=type(data).__name__)
    for name, value in kind.faults(data):
        raise refusal(name, value=value)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(
            [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
        ) from error


def _json(body: bytes) -> Any:
    if not body:
        raise _invalid([MISSING_BODY])
    try:
        data = json.loads(body)
    except json.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise _invalid([{**detail, "ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        raise refusal("unreadable body") from error
    if data is None:
        raise _invalid([MISSING_BODY])
    return data


def prompts_of(request: AnyRequest) -> list[list[int]]:
    """Token ids of every prompt; ApiError for text that has no UTF-8 form (a lone surrogate)."""
    try:
        return request.prompts()
    except UnicodeEncodeError as error:
        raise refusal("not text") from error


def _invalid(details: list[dict[str, Any]]) -> ApiError:
    # FastAPI's text of a RequestValidationError, then the list itself, as vLLM's handler joins them.
    count = f"{len(details)} validation error{'' if len(details) == 1 else 's'}:"
    text = "\n".join([count, *(f"  {detail}" for detail in details)])
    newer = ("Bad Request", field_path(details[0]["loc"]))
    return ApiError(f"{text} {details}", "Bad Request", None, HTTPStatus.BAD_REQUEST.value, newer)


def field_path(loc: tuple[str | int, ...]) -> str:
    """Where a field stands, as vLLM 0.30 writes it: pydantic's place without its names for types.

    Source: vllm/entrypoints/serve/exception_handling/handlers/validation.py, ``clean_loc_for_param``.
    """
    parts = [str(part) for part in loc if not (isinstance(part, str) and (part in ("str", "int") or "[" in part))]
    if parts[:2] == ["body", "messages"] and len(parts) > 3:
        # There a message is one of several typed dictionaries; the first one's complaint counts.
        parts.insert(3, "ChatCompletionDeveloperMessageParam")
    return ".".join(parts)


def check_sampling(request: AnyRequest) -> None:
    """SamplingParams' own checks, in its order. Source: vllm/sampling_params.py, ``_verify_args``."""
    for limit in recorded("refusals")["sampling"]:
        value = getattr(request, limit["field"])
        lowest, highest = limit.get("at_least", -inf), limit.get("at_most", inf)
        if value is not None and not (lowest <= value <= highest and value > limit.get("above", -inf)):
            raise refusal(limit, value=value)
    if any(not text for text in request.stop_texts):
        raise refusal("empty stop")
    temperature = 1.0 if request.temperature is None else request.temperature
    if request.n is not None and request.n > 1 and temperature < GREEDY_BELOW:
        raise refusal("greedy choices", value=request.n)
    wanted = request.wanted_logprobs
    if wanted is not None and wanted.num_top > MOST_LOGPROBS:
        raise refusal("logprobs too many", value=wanted.num_top, most=MOST_LOGPROBS)


def check_lengths(request: AnyRequest, prompt: list[int], max_model_len: int) -> int:
    """The number of tokens to generate at most; raises as vLLM does when prompt and output do not fit the model.

    Sources: vllm/renderers/params.py, vllm/entrypoints/utils.py, vllm/v1/engine/input_processor.py.
    """
    limit, name = request.output_limit
    if limit is not None and limit > max_model_len:
        raise refusal("answer longer than the model", param=name, value=limit, room=max_model_len)
    num_tokens, answer = len(prompt), limit or 0
    if num_tokens > max_model_len - answer:
        raise refusal(
            "prompt and answer longer than the model",
            value=num_tokens,
            answer=answer,
            total=num_tokens + answer,
            room=max_model_len,
        )
    room = max_model_len - num_tokens
    max_tokens = room if limit is None else min(room, limit)
    if max_tokens < 1:
        raise refusal("no token to generate", value=max_tokens)
    if request.min_tokens > max_tokens:
        raise refusal("min_tokens above max_tokens", value=request.min_tokens, most=max_tokens)
    if num_tokens == 0:
        raise refusal("empty prompt")
    if (largest := max(prompt)) >= VOCAB_SIZE:
        raise refusal("token out of vocabulary", value=largest)
    return max_tokens
