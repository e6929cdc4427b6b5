"""Types of rows in Codex's logs that are known and say nothing of a call, or what another row says too, with why."""

from __future__ import annotations

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
    **dict.fromkeys(("turn_diff", "turn_moderation_metadata", "inter_agent_communication_metadata"), "a notice"),
}
ITEMS = (
    *("UserMessage", "HookPrompt", "AgentMessage", "FunctionCallOutput", "Plan", "Reasoning", "CommandExecution"),
    *("DynamicToolCall", "CollabAgentToolCall", "SubAgentActivity", "WebSearch", "ImageView", "ImageGeneration"),
    *("EnteredReviewMode", "ExitedReviewMode", "FileChange", "McpToolCall", "ContextCompaction", "Extension", "Sleep"),
)
"""Items whose end an ``item_completed`` of Codex tells."""
