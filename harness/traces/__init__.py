"""Recorded agents: one reader per format, one middle form, one way from there to a plan.

Readers look at counts, names and times only; no text of a recording gets past them.
"""
