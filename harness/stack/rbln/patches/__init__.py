"""Patches of the vendor's packages: which there are, what they add, where they are applied, what they cost."""
