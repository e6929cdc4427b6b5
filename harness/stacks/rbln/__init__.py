"""vLLM-RBLN: everything that one of its releases can change. ``rules`` is read by all, ``launch`` starts servers."""
