"""Types of rows in Codex's logs (``codex.toml``): what each is to its session, or why it is passed over."""

from __future__ import annotations

from pathlib import Path

from harness.model.traces.base import Record, by_type, read_tables, text_of

TABLES = read_tables(Path(__file__).with_name("codex.toml"))
PASSED, ROLES, ITEMS = (by_type(TABLES[name]) for name in ("passed", "roles", "items"))
ENDINGS = {"_call": "output", "_output": "result"}


def role_of(payload: Record, kind: str, form: str) -> str:
    """What a row is to its session: a role of ``ROLES`` or ``ENDINGS``, "passed" or "unknown"."""
    if kind in ("item_completed", "item_started"):
        return ITEMS.get(text_of(payload, "item", "type"), "unknown")
    names = (f"{form}{kind} {text_of(payload, 'role')}", f"{form}{kind}", kind)
    role = next((ROLES[name] for name in names if name in ROLES), "passed" if kind in PASSED else "unknown")
    if form == "response_item/" and role in ("passed", "unknown"):
        role = next((ENDINGS[end] for end in ENDINGS if kind.endswith(end)), role)
    return "passed" if role == "count" and payload.get("info") is None else role
