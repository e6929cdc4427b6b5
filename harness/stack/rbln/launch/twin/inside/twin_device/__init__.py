"""A device that computes nothing: it tracks the content of KV memory, and takes the time of a cost model.

It imports neither the harness nor torch, so tests can predict its tokens.
"""
