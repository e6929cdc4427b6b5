"""Types of rows in Codex's logs: what each is to its session, or why it is passed over."""

from __future__ import annotations

from harness.model.traces.base import Record, text_of

AGAIN, STATE = "said by a response item too", "a setting, or state of the program"
PASSED = {
    **dict.fromkeys(("agent_reasoning", "agent_reasoning_raw_content", "agent_message", "raw_response_item"), AGAIN),
    **dict.fromkeys(("exec_command_begin", "exec_command_end", "mcp_tool_call_begin", "mcp_tool_call_end"), AGAIN),
    **dict.fromkeys(("patch_apply_begin", "patch_apply_end", "web_search_begin", "web_search_end"), AGAIN),
    **dict.fromkeys(("view_image_tool_call", "image_generation_begin", "image_generation_end"), AGAIN),
    **dict.fromkeys(
        ("dynamic_tool_call_request", "dynamic_tool_call_response", "item_started", "item_completed"), AGAIN
    ),
    **dict.fromkeys(("sub_agent_activity", "collab_agent_spawn_end", "collab_waiting_end", "collab_close_end"), AGAIN),
    **dict.fromkeys(("collab_agent_interaction_end", "collab_resume_end", "plan_update", "context_compacted"), AGAIN),
    **dict.fromkeys(("task_complete", "turn_complete", "turn_aborted", "thread_rolled_back"), "ends a turn"),
    **dict.fromkeys(("turn_context", "thread_settings_applied", "thread_name_updated", "session_configured"), STATE),
    **dict.fromkeys(("thread_goal_updated", "entered_review_mode", "exited_review_mode", "additional_tools"), STATE),
    **dict.fromkeys(("world_state", "retained_context", "ghost_snapshot", "hook_started", "hook_completed"), STATE),
    **dict.fromkeys(("error", "warning", "stream_error", "background_event", "deprecation_notice"), "a notice"),
    **dict.fromkeys(("guardian_assessment", "guardian_warning", "model_reroute", "model_verification"), "a notice"),
    "token_count": "limits of rate, without a count",
    **dict.fromkeys(("turn_diff", "turn_moderation_metadata", "inter_agent_communication_metadata"), "a notice"),
}
ITEMS = (
    *("UserMessage", "HookPrompt", "AgentMessage", "FunctionCallOutput", "Plan", "Reasoning", "CommandExecution"),
    *("DynamicToolCall", "CollabAgentToolCall", "SubAgentActivity", "WebSearch", "ImageView", "ImageGeneration"),
    *("EnteredReviewMode", "ExitedReviewMode", "FileChange", "McpToolCall", "ContextCompaction", "Extension", "Sleep"),
)
"""Items whose end an ``item_completed`` of Codex tells."""
ROLES = {
    **dict.fromkeys(("user_message", "response_item/message user"), "person"),
    **dict.fromkeys(("task_started", "turn_started"), "turn"),
    **dict.fromkeys(("compacted", "inter_agent_communication"), "hint"),
    **dict.fromkeys(("response_item/message", "response_item/agent_message"), "hint"),
    **dict.fromkeys(("response_item/message assistant", "response_item/reasoning"), "output"),
    **dict.fromkeys(("response_item/compaction", "response_item/compaction_summary"), "output"),
    "response_item/context_compaction": "output",
    **dict.fromkeys(("agent_message", "agent_reasoning"), "said"),
    "token_count": "count",
    "token_usage_record": "record",
}
"""By form and type, and who said it; "said" is an output that an item tells too."""
ENDINGS = {"_call": "output", "_output": "result"}


def role_of(payload: Record, kind: str, form: str) -> str:
    """What a row is to its session: a role of ``ROLES`` or ``ENDINGS``, "passed" or "unknown"."""
    if kind in ("item_completed", "item_started"):
        item = text_of(payload, "item", "type")
        return "person" if item == "UserMessage" else "passed" if item in ITEMS else "unknown"
    names = (f"{form}{kind} {text_of(payload, 'role')}", f"{form}{kind}", kind)
    role = next((ROLES[name] for name in names if name in ROLES), "passed" if kind in PASSED else "unknown")
    if form == "response_item/" and role in ("passed", "unknown"):
        role = next((ENDINGS[end] for end in ENDINGS if kind.endswith(end)), role)
    return "passed" if role == "count" and payload.get("info") is None else role
