"""Records of runs: Arrow schemas, the writer that seals them, and the store that reads them.

Only sealed runs are visible. They are plain Parquet and JSON that any tool can read. Begin at ``run.SealedRun``.
Nothing is imported here, so that a replay loads the schemas alone.
"""
