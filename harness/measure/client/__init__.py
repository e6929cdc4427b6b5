"""The replay clients: a plan's requests are sent when they are due, and the answers are stamped and kept.

Begin at ``run.replay``. Nothing is imported here, because small helper processes are started from this package.
"""
