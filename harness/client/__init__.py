"""The replay clients: what a plan asks for is sent when it is due, and what comes back is stamped and kept.

``run.replay`` is the door. Nothing is imported here, since small helper processes are started from this package.
"""
