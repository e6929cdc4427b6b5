"""The runtime's compile context: a value that is passed around and never looked into here."""

from __future__ import annotations


class CompileContext:
    """Remembers what it was made with."""

    def __init__(self, use_weight_sharing: bool = False, use_global_ctx: bool = False, **options: object) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.options = options
