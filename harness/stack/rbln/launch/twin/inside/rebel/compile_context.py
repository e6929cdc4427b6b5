"""The runtime's compile context: passed around, never read here."""

from __future__ import annotations


class CompileContext:
    """Stores its arguments."""

    def __init__(self, use_weight_sharing: bool = False, use_global_ctx: bool = False, **options: object) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.options = options
