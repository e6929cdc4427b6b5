"""The twin: the real vLLM and vllm-rbln, in a separate environment, on a stand-in for the closed device runtime.

``inside/`` goes on the server's PYTHONPATH and imports nothing of the harness. Installed files are never edited.
"""
