"""vLLM-RBLN: everything that one of its releases can change.

What a release decides (``kv_rules``), says (``log_grammar``, ``dialect``) and takes (``serve_command``, ``artifacts``),
the patches and the observer that make a served stack show (n, b), and the twin that serves it without a device.
"""
