"""Types of rows in agents' logs that are known and say nothing of a call, or what another row says too, with why."""

from __future__ import annotations

SETTINGS, TITLES = "a setting, or state of the program", "a title or a summary of the session, made beside it"
COPIES = "files, prompts or replaced contents as they were, kept to go back to"
CLAUDE = {
    **dict.fromkeys(("summary", "custom-title", "ai-title", "task-summary", "tag", "agent-name", "pr-link"), TITLES),
    **dict.fromkeys(("mode", "permission-mode", "agent-color", "agent-setting", "worktree-state"), SETTINGS),
    **dict.fromkeys(("atis-latch", "isolation-latch", "history-suppression", "bridge-session"), SETTINGS),
    **dict.fromkeys(("continued-in", "ended-by-model", "relocated", "fork-context-ref", "observer-ref"), SETTINGS),
    **dict.fromkeys(("frame-link", "artifact-autoreact-ledger", "artifact-comment-monitor"), SETTINGS),
    **dict.fromkeys(("file-history-snapshot", "file-history-delta", "attribution-snapshot", "last-prompt"), COPIES),
    **dict.fromkeys(("content-replacement", "marble-origami-commit", "marble-origami-reset"), COPIES),
    "marble-origami-snapshot": COPIES,
    "queue-operation": "a prompt on its way: its user row has it too",
    "speculation-accept": "a count of the program",
    "cost-state": "sums over sessions",
    "progress": "progress of a tool: its result has the end",
    "system": "a notice of the program: of its hooks, durations and errors",
}
AGAIN, STATE = "said by a response item too", "a setting, or state of the program"
CODEX = {
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
CODEX_ITEMS = (
    *("UserMessage", "HookPrompt", "AgentMessage", "FunctionCallOutput", "Plan", "Reasoning", "CommandExecution"),
    *("DynamicToolCall", "CollabAgentToolCall", "SubAgentActivity", "WebSearch", "ImageView", "ImageGeneration"),
    *("EnteredReviewMode", "ExitedReviewMode", "FileChange", "McpToolCall", "ContextCompaction", "Extension", "Sleep"),
)
"""Items whose end an ``item_completed`` of Codex tells."""
