"""Patches of the vendor's packages: manifests, audit, overlay, and the experiment that measures their cost."""
