"""What clients may send, checked as vLLM checks it, and the error bodies they get when it is wrong.

Unknown fields are allowed and ignored, as there. Nothing here touches the engine.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.emulator.logprobs import MOST_LOGPROBS, WantedLogprobs
from harness.emulator.tokens import VOCAB_SIZE, chat_prompt, encode
from harness.stack.rbln.dialect import Dialect

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EchoMode = Literal["", "before", "alone"]
TokenId = Annotated[int, Field(ge=0)]
MISSING_BODY = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
MOST_CHOICES = 16_384  # VLLM_MAX_N_SEQUENCES
GREEDY_BELOW = 1e-5  # vllm/sampling_params.py, _SAMPLING_EPS


class ApiError(Exception):
    """A request that is answered with an error body; ``param`` names the field at fault, when one is."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        param: str | None = None,
        named: tuple[str, str | None] | None = None,
    ) -> None:
        """named: kind and param in dialects that name the field at fault, where they differ from the others'."""
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param
        self._named = named

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """vLLM's ErrorResponse."""
        kind, param = self._named if self._named and dialect.names_fields else (self.kind, self.param)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": int(self.status)}}


def bad_field(message: str, param: str, value: Any = None) -> ApiError:
    """VLLMValidationError: the message ends with the field and its value."""
    extra = f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return ApiError(message + extra, param=param)


class VLLMValidationError(ValueError):
    """Raised inside a model validator when vLLM names the field in ``param``; its name is in the error's text."""

    def __init__(self, message: str, param: str, value: Any = None) -> None:
        super().__init__(message)
        self.param, self.value = param, value

    def __str__(self) -> str:
        value = "" if self.value is None else f", value={self.value}"
        return f"{super().__str__()} (parameter={self.param}{value})"


class LaterNamedError(VLLMValidationError):
    """One whose field vLLM names from 0.30 on only."""

    def __str__(self) -> str:
        return str(self.args[0])


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _GenerationRequest(BaseModel):
    """The fields that both endpoints share; what the emulator does not act on is checked all the same."""

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

    @model_validator(mode="before")
    @classmethod
    def _checked_together(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("stream_options") and not data.get("stream"):
                raise VLLMValidationError("Stream options can only be defined when `stream=True`.", "stream_options")
            if data.get("stream") and (data.get("prompt_logprobs") or 0) != 0:
                message = "`prompt_logprobs` are not available when `stream=True`."
                raise VLLMValidationError(message, "prompt_logprobs")
            salt = data.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError("Parameter 'cache_salt' must be a non-empty string if provided.")
        return data

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

    @model_validator(mode="before")
    @classmethod
    def _has_prompt(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("prompt") in (None, ""):
            raise LaterNamedError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return data

    @model_validator(mode="before")
    @classmethod
    def _logprobs_make_sense(cls, data: Any) -> Any:
        if isinstance(data, dict):
            wanted = data.get("logprobs")
            if isinstance(wanted, int) and wanted < 0:
                raise VLLMValidationError("`logprobs` must be a positive value.", "logprobs", wanted)
        return data

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
            raise ApiError("You must pass at least one prompt")
        if isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]  # a list of int, by the field's own check
        return [encode(one) if isinstance(one, str) else one for one in prompt]  # pyright: ignore[reportReturnType]

    def check_supported(self) -> None:
        """Raise for what ends the real engine (vllm-rbln 0.11.1), so that nobody measures a silent difference."""
        if self.echo and self.logprobs is not None:
            raise not_emulated("echo with logprobs", "logprobs")
        check_prompt_logprobs(self.prompt_logprobs)


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

    @model_validator(mode="before")
    @classmethod
    def _tools_make_sense(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("tools") == []:
                raise ValueError(
                    "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
                )
            top = data.get("top_logprobs")
            if isinstance(top, int) and not isinstance(top, bool):
                if top < 0 and top != -1:
                    message = "`top_logprobs` must be a positive value or -1."
                    raise VLLMValidationError(message, "top_logprobs", top)
                if top != 0 and not data.get("logprobs"):
                    message = "when using `top_logprobs`, `logprobs` must be set to true."
                    raise VLLMValidationError(message, "top_logprobs")
            if data.get("tool_choice") not in (None, "none") and data.get("tools") is None:
                raise ValueError("When using `tool_choice`, `tools` must be set.")
        return data

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
            raise ApiError("list index out of range")  # what the chat template says of it
        turns = [(message.role, message.text) for message in self.messages]
        return [encode(chat_prompt(turns, add_generation_prompt=self.add_generation_prompt))]

    def check_supported(self) -> None:
        """Raise for what vLLM does and the emulator does not."""
        check_prompt_logprobs(self.prompt_logprobs)
        if self.tools is not None and self.tool_choice != "none":
            raise ApiError('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')


AnyRequest = CompletionRequest | ChatRequest
RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


def check_prompt_logprobs(prompt_logprobs: int | None) -> None:
    """Log probabilities of a prompt end the engine of vllm-rbln 0.11.1: its runner lacks a field that they need."""
    if prompt_logprobs is not None:
        raise not_emulated("prompt_logprobs", "prompt_logprobs")


def not_emulated(what: str, field: str) -> ApiError:
    """501, as vLLM answers for what a model does not support."""
    return ApiError(
        f"{what} is not supported by the emulator",
        status=HTTPStatus.NOT_IMPLEMENTED,
        kind="NotImplementedError",
        param=field,
    )


def parse_request(kind: type[RequestT], body: bytes, content_type: str) -> RequestT:
    """The request in an HTTP body; raises ApiError shaped like vLLM's validation handler."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise _bad_request(["Unsupported Media Type: Only 'application/json' is allowed"])
    if not body:
        raise _bad_request([MISSING_BODY])
    try:
        data = json.loads(body)
    except json.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise _bad_request([{**detail, "ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        raise ApiError("There was an error parsing the body", kind="Bad Request") from error
    if data is None:
        raise _bad_request([MISSING_BODY])
    if not isinstance(data, dict):
        # A defect of vLLM 0.22 that clients can see: its validators call ``get`` before anyone checks the type.
        message = f"'{type(data).__name__}' object has no attribute 'get'"
        raise ApiError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR, kind="InternalServerError")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        causes = [cause for cause in map(_cause, details) if isinstance(cause, VLLMValidationError)]
        items = [{**detail, "loc": ("body", *detail["loc"])} for detail in details]
        named = ("BadRequestError", causes[0].param) if causes else None
        params = [cause.param for cause in causes if not isinstance(cause, LaterNamedError)]
        raise _bad_request(items, params[0] if params else None, named) from error


def _cause(detail: Any) -> Any:
    return detail.get("ctx", {}).get("error")


def prompts_of(request: AnyRequest) -> list[list[int]]:
    """Token ids of every prompt; ApiError for text that has no UTF-8 form (a lone surrogate)."""
    try:
        return request.prompts()
    except UnicodeEncodeError as error:
        wanted = "Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise ApiError(f"TextEncodeInput must be {wanted}") from error


def _bad_request(details: list[Any], param: str | None = None, named: tuple[str, str | None] | None = None) -> ApiError:
    # FastAPI's text of a RequestValidationError, then the list itself, as vLLM's handler joins them.
    if named is None and isinstance(details[0], dict):
        named = ("Bad Request", field_path(details[0]["loc"]))
    count = f"{len(details)} validation error{'' if len(details) == 1 else 's'}:"
    text = "\n".join([count, *(f"  {detail}" for detail in details)])
    return ApiError(f"{text} {details}", kind="Bad Request", param=param, named=named)


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
    n = 1 if request.n is None else request.n
    temperature = 1.0 if request.temperature is None else request.temperature
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > MOST_CHOICES:
        hint = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise ApiError(f"n must be at most {MOST_CHOICES}, got {n}. {hint}")
    for name, penalty in (("presence", request.presence_penalty), ("frequency", request.frequency_penalty)):
        if penalty is not None and not -2.0 <= penalty <= 2.0:
            raise ApiError(f"{name}_penalty must be in [-2, 2], got {penalty}.")
    if request.repetition_penalty is not None and request.repetition_penalty <= 0:
        raise ApiError(f"repetition_penalty must be greater than zero, got {request.repetition_penalty}.")
    if temperature < 0:
        raise bad_field(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise bad_field(f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p)
    if request.top_k is not None and request.top_k < -1:
        raise ApiError(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        raise ApiError(f"min_p must be in [0, 1], got {request.min_p}.")
    if request.min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {request.min_tokens}.")
    if any(not text for text in request.stop_texts):
        raise ApiError("stop cannot contain an empty string.")
    if n > 1 and temperature < GREEDY_BELOW:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")
    wanted = request.wanted_logprobs
    if wanted is not None and wanted.num_top > MOST_LOGPROBS:
        message = f"Requested sample logprobs of {wanted.num_top}, which is greater than max allowed: {MOST_LOGPROBS}"
        raise bad_field(message, "logprobs", wanted.num_top)


def check_lengths(request: AnyRequest, prompt: list[int], max_model_len: int) -> int:
    """The number of tokens to generate at most; raises as vLLM does when prompt and output do not fit the model.

    Sources: vllm/renderers/params.py, vllm/entrypoints/utils.py, vllm/v1/engine/input_processor.py.
    """
    limit, name = request.output_limit
    if limit is not None and limit > max_model_len:
        raise bad_field(
            f"{name}={limit} cannot be greater than max_model_len=max_total_tokens={max_model_len}. "
            "Please request fewer output tokens.",
            name,
            limit,
        )
    num_tokens, wanted = len(prompt), limit or 0
    if num_tokens > max_model_len - wanted:
        raise bad_field(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} output "
            f"tokens and your prompt contains {num_tokens} input tokens, for a total of {num_tokens + wanted} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            num_tokens,
        )
    room = max_model_len - num_tokens
    max_tokens = room if limit is None else min(room, limit)
    if max_tokens < 1:
        raise bad_field(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if request.min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {request.min_tokens}.")
    if num_tokens == 0:
        raise ApiError("The decoder prompt cannot be empty")
    if (largest := max(prompt)) >= VOCAB_SIZE:
        raise ApiError(f"Token id {largest} is out of vocabulary")
    return max_tokens
