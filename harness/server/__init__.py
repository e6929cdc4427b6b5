"""A server process from start to end, under a supervisor that outlives us by as long as clearing up takes."""
