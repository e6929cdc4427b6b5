"""What a release of vllm-rbln decides (``kv_rules``), answers (``dialect``) and logs (``log_grammar``).

Nothing here starts or patches a server.
"""
