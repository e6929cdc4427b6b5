"""The twin: the real vLLM and vllm-rbln, in an environment of their own, on a stand-in for the closed device runtime.

``inside/`` goes on the server's PYTHONPATH and imports nothing of the harness; the rest prepares and describes it.
It never edits an installed file.
"""
