"""Recorded agents: a reader for each format, recordings, and the way from them to a plan.

Readers look at counts, names and times only; no text of a recording gets past them.
"""
