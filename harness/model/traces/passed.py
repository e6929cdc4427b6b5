"""Types of rows in Claude Code's logs that are known and say nothing of a call, or what another row says, with why."""

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
