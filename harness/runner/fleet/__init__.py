"""Blocks of an experiment side by side: a process for each device of this host, or Dask workers of other hosts.

What is left to do is always planned minus sealed. No state is kept here.
"""
