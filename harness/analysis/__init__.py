"""Figures from sealed runs: log parsing, derived tables, reconstruction, invariants and summaries.

Pure functions of records: no server, no socket, no clock. Next: ``harness.report`` shows what these compute.
"""
