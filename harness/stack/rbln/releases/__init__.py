"""What the harness knows of each release of the vendor's stack, and what of it still holds in one nobody has read."""
