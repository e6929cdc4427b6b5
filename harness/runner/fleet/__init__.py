"""Blocks side by side: a process per device on this host, or a worker per device on many.

What is left to do is always planned minus sealed; nothing here keeps a state of its own. Next: ``local`` drives one
host's devices, ``worker`` is the process of one.
"""
