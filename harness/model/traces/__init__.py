"""Recorded agents: a reader for each format, recordings, and the way to a plan. No text gets past a reader."""
