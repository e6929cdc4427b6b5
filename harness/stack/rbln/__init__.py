"""vLLM-RBLN: everything that one of its releases can change.

Rules of a release (``kv_rules``), its log and answers (``log_grammar``, ``dialect``), its launch (``serving``,
``artifacts``), the patches and the observer that make a served stack show (n, b), and the twin, which runs it without a
device.
"""
