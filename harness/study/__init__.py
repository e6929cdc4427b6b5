"""The published study and the catalogue of experiments: its analyses, its tables, its simulator's printed figures.

Nothing but the command line imports it, and no measurement depends on it.
"""
