"""A server's life, the replay of a plan, and the sealed record of it."""
