"""What the figures of runs say: comparisons of conditions, summaries, decisions and the analyses of experiments.

Reads records and figures alone: no server, no socket, no clock.
"""
