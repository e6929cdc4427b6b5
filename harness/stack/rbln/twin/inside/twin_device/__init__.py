"""A device that computes nothing: it remembers what would be in KV memory, and takes as long as a cost model says.

Without the harness or torch, so that tests can predict its tokens.
"""
