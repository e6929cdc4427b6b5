"""Whether a run counts: its invariants, its answers against its plan, and what stood still."""
