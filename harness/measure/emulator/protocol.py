"""Requests, checked as vLLM checks them, and the errors that refuse wrong requests.

Status, type and param of an error are vLLM's; most texts are shorter. Unknown fields are allowed and ignored, as in
vLLM. Nothing here touches the engine.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from harness.measure.emulator.model import NUM_WORDS, VOCAB_SIZE, chat_prompt, encode, words_in
from harness.measure.emulator.tools import words_of
from harness.stacks.rbln.rules.dialect import Dialect

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TokenId = Annotated[int, Field(ge=0)]
# What vLLM does and the emulator does not, with the values that ask for nothing.
NOT_EMULATED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, "", []),
    "stop_token_ids": (None, []),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "truncate_prompt_tokens": (None,),
}
# The type of errors that FastAPI's validation finds, and of those that vLLM itself finds.
BAD_FORM, BAD_VALUE = "Bad Request", "BadRequestError"


class ApiError(Exception):
    """A request that gets an error body. newer: type and param in releases that name the wrong field."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        kind: str = BAD_VALUE,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        newer: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.kind, self.param, self.status, self.newer = message, kind, param, status.value, newer

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """vLLM's ErrorResponse."""
        kind, param = self.newer if self.newer and dialect.names_fields else (self.kind, self.param)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.status}}


def server_error(message: str) -> ApiError:
    """The answer where the server itself failed."""
    return ApiError(message, kind="InternalServerError", status=HTTPStatus.INTERNAL_SERVER_ERROR)


def _wrong_form(place: str, message: str) -> ApiError:
    return ApiError(f"1 validation error: {place}: {message}", kind=BAD_FORM, newer=(BAD_FORM, place))


def _wrong(param: str, message: str) -> PydanticCustomError:
    """A wrong combination of fields, reported under the name of one of them."""
    return PydanticCustomError("combination", "{text}", {"text": message, "param": param})


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _GenerationRequest(BaseModel):
    """The fields of both endpoints. Fields that the emulator ignores are checked too."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    user: str | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    priority: int = Field(default=0, ge=INT64_MIN, le=INT64_MAX)
    request_id: str = ""
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    keep_kv_ms: float | None = Field(None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _combinations(cls, data: Any) -> Any:
        # vLLM checks these before the types.
        if data.get("stream_options") and not data.get("stream"):
            raise _wrong("stream_options", "stream options need stream=true")
        salt = data.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValueError("cache_salt must be a text that is not empty")
        return data

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each event has the usage so far; as in vLLM only where the stream has usage at all."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _completion_combinations(cls, data: Any) -> Any:
        if data.get("prompt") in (None, ""):
            raise _wrong("prompt", "a prompt must be given, and not be empty")
        return data

    @property
    def output_limit(self) -> tuple[int | None, str]:
        return self.max_tokens, "max_tokens"

    @property
    def has_ids(self) -> bool:
        """Whether the client chose the token ids of some prompt."""
        return isinstance(self.prompt, list) and not all(isinstance(part, str) for part in self.prompt)

    def prompts(self, num_words: int = NUM_WORDS) -> list[list[int]]:
        """Token ids of every prompt in the request."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [encode(prompt, num_words)]
        if not prompt:
            raise ApiError("at least one prompt must be given")
        if isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]  # a list of int, by the field's own check
        return [encode(part, num_words) if isinstance(part, str) else part for part in prompt]  # pyright: ignore[reportReturnType]


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
        called = words_of(self.model_extra or {})
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content) + called
        return (self.content or "") + called


class ChatRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def called_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def output_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def has_ids(self) -> bool:
        return False

    def prompts(self, num_words: int = NUM_WORDS) -> list[list[int]]:
        """Token ids of the templated conversation."""
        if not self.messages:
            raise ApiError("at least one message must be given")
        turns = [(message.role, message.text) for message in self.messages]
        if self.called_tools:
            turns.insert(0, ("tools", json.dumps(self.called_tools)))
        return [encode(chat_prompt(turns, add_generation_prompt=self.add_generation_prompt), num_words)]


AnyRequest = CompletionRequest | ChatRequest
RequestT = TypeVar("RequestT", bound=AnyRequest)


def parse_request(kind: type[RequestT], body: bytes, content_type: str) -> RequestT:
    """The request in an HTTP body; raises ApiError shaped like vLLM's validation handler."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise ApiError("Unsupported Media Type: Only 'application/json' is allowed", kind=BAD_FORM)
    try:
        data = json.loads(body or "null")
    except (ValueError, RecursionError) as error:
        place = f"body.{error.pos}" if isinstance(error, json.JSONDecodeError) else "body"
        raise _wrong_form(place, f"JSON decode error: {error}") from error
    if data is None:
        raise _wrong_form("body", "Field required")
    try:
        return kind.model_validate(data)
    except AttributeError as error:
        # A defect of vLLM 0.22 that clients can see: its validators call ``get`` before anyone checks the type.
        raise server_error(str(error)) from error
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    """The first fault as vLLM reports it: a wrong combination, a value that SamplingParams refuses, or a wrong form."""
    fault = error.errors(include_url=False)[0]
    kind, message, place = fault["type"], fault["msg"], fault["loc"]
    if kind == "combination":
        param = fault.get("ctx", {})["param"]
        # Before 0.30 a missing prompt was not named.
        older = None if param == "prompt" else param
        return ApiError(f"1 validation error: {message}", older, kind=BAD_FORM, newer=(BAD_VALUE, param))
    if len(place) == 1 and kind.startswith(("greater_than", "less_than")):
        param = place[0] if place[0] in ("temperature", "top_p") else None
        return ApiError(f"{place[0]}: {message}, got {fault['input']}", param)
    return _wrong_form(field_path(("body", *place)), message)


def field_path(loc: tuple[str | int, ...]) -> str:
    """Where a field stands, as vLLM 0.30 writes it: pydantic's place without its names for types.

    Source: vllm/entrypoints/serve/exception_handling/handlers/validation.py, ``clean_loc_for_param``.
    """
    parts = [str(part) for part in loc if not (isinstance(part, str) and (part in ("str", "int") or "[" in part))]
    if parts[:2] == ["body", "messages"] and len(parts) > 3:
        # There a message is one of several typed dictionaries; the first one's complaint counts.
        parts.insert(3, "ChatCompletionDeveloperMessageParam")
    return ".".join(parts)


def checked_prompt(
    request: AnyRequest, max_model_len: int, vocab_size: int = VOCAB_SIZE, *, has_tools: bool = False
) -> tuple[list[int], int]:
    """Token ids of the prompt, and the number of tokens to generate at most; raises ApiError for a wrong value.

    What vLLM does and the emulator does not is refused, so that no difference stays unnoticed.
    """
    for name, value in (request.model_extra or {}).items():
        # By their text: 0 logprobs are asked for, False are not.
        if name in NOT_EMULATED and repr(value) not in map(repr, NOT_EMULATED[name]):
            raise _not_emulated(name, name)
    if isinstance(request, ChatRequest) and request.called_tools and not has_tools:
        # vLLM's words; the emulator calls tools with --tools.
        what = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        raise ApiError(f"{what} (the emulator calls tools with --tools)")
    try:
        prompts = request.prompts(words_in(vocab_size))
    except UnicodeEncodeError as error:
        raise ApiError("the text has no UTF-8 form: it holds half of a surrogate pair") from error
    if len(prompts) > 1:
        raise _not_emulated("several prompts in one request", "prompt")
    (prompt,) = prompts
    max_tokens = _output_limit(request, prompt, max_model_len)
    if request.has_ids and (largest := max(prompt)) >= vocab_size:
        raise ApiError(f"Token id {largest} is out of vocabulary")
    return prompt, max_tokens


def _not_emulated(what: str, param: str) -> ApiError:
    # Never a 5xx: agents try that again for minutes, without a word.
    return ApiError(f"the emulator does not support {what}: leave it out of the request", param)


def _output_limit(request: AnyRequest, prompt: list[int], max_model_len: int) -> int:
    """The number of tokens to generate at most; raises as vLLM does when prompt and output do not fit the model.

    Sources: vllm/renderers/params.py, vllm/entrypoints/utils.py, vllm/v1/engine/input_processor.py.
    """
    limit, name = request.output_limit
    num_tokens, answer = len(prompt), limit or 0
    if answer > max_model_len:
        raise ApiError(f"{name}={answer} cannot be greater than max_model_len={max_model_len}", name)
    if num_tokens > max_model_len - answer:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {answer} output "
            f"tokens and your prompt contains {num_tokens} input tokens, for a total of {num_tokens + answer} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    room = max_model_len - num_tokens
    max_tokens = room if limit is None else min(room, limit)
    if max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    if request.min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {request.min_tokens}")
    if num_tokens == 0:
        raise ApiError("The decoder prompt cannot be empty")
    return max_tokens
