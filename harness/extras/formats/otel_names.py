"""Names of attributes and operations of the semantic conventions, and of what came before and beside them."""

from __future__ import annotations

import re

CHATS = ("chat", "text_completion", "generate_content", "completion", "llm")
OPERATIONS = ("gen_ai.operation.name", "openinference.span.kind", "llm.request.type", "traceloop.span.kind")
MODELS = ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
PROVIDERS = ("gen_ai.provider.name", "gen_ai.system", "llm.provider", "llm.system")
AROUND, TOOLS = "around calls", "what a call leads to: its time is part of the wait"
PASSED = {
    **dict.fromkeys(("invoke_agent", "invoke_workflow", "agent", "chain", "workflow", "task", "create_agent"), AROUND),
    **dict.fromkeys(("execute_tool", "tool", "retriever", "retrieval", "guardrail", "prompt"), TOOLS),
    **dict.fromkeys(("embeddings", "embedding", "rerank", "reranker", "evaluator"), "a request to another model"),
    "no operation": "a span without a model, an operation or counts",
}
# The conventions of OpenTelemetry, OpenLLMetry, OpenInference, and the AI SDK.
NAMES = {
    "prompt": (
        *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
        *("llm.usage.prompt_tokens", "ai.usage.inputTokens", "ai.usage.promptTokens"),
    ),
    "generate": (
        *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
        *("llm.usage.completion_tokens", "ai.usage.outputTokens", "ai.usage.completionTokens"),
    ),
    "cached": (
        *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cached_tokens"),
        *("llm.token_count.prompt_details.cache_read", "llm.usage.cache_read_input_tokens"),
        *("gen_ai.usage.cached_input_tokens", "gen_ai.usage.prompt_tokens_details.cached_tokens"),
        *("gen_ai.usage.details.cache_read_tokens", "gen_ai.usage.details.cache_read_input_tokens"),
        *("ai.usage.cachedInputTokens", "ai.usage.inputTokenDetails.cacheReadTokens"),
        "gen_ai.usage.input_tokens.cached",
    ),
    "created": (
        *("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens"),
        *("llm.token_count.prompt_details.cache_write", "llm.usage.cache_creation_input_tokens"),
        *("gen_ai.usage.details.cache_write_tokens", "gen_ai.usage.details.cache_creation_input_tokens"),
        *("ai.usage.inputTokenDetails.cacheWriteTokens", "gen_ai.usage.input_tokens.cache_write"),
    ),
    "rest": ("ai.usage.inputTokenDetails.noCacheTokens",),  # of the prompt; not needed
}
COUNTS = frozenset(name for names in NAMES.values() for name in names)
LIKE_CACHED = re.compile(r"(usage|token).*cache|cache.*token", re.IGNORECASE)
