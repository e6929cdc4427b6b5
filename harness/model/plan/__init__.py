"""Input plans: what every session sends and how long it waits, content-addressed and the same for all conditions.

Nothing here reads a clock or opens a socket. Begin at ``model.Plan``. Nothing is imported here, so that a
replay does not load the code that draws plans.
"""
