"""Everything that depends on a serving stack: a folder per stack."""
