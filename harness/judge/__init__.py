"""What the figures mean: power, decisions, the paper's catalogue, preregistration.

Reads records and figures alone: no server, no socket, no clock.
"""
