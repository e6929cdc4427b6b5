"""The observer: a vLLM plugin that writes one record per engine step from inside the server, editing no file.

``inside/`` is a separate distribution, for the server's PYTHONPATH or ``pip install``; it imports nothing of the
harness. This module has only its place and the variables that switch it on.
"""

from __future__ import annotations

from pathlib import Path

INSIDE = Path(__file__).resolve().parent / "inside"
OBSERVE_FILE = INSIDE / "rbln_observer" / "observe.py"
FILE_VARIABLE = "RBLN_OBSERVER_FILE"
PLUGIN_NAME = "rbln_observer"


def observer_variables(file: Path, allowed_plugins: str | None = None) -> dict[str, str]:
    """Variables that switch the observer on, with INSIDE on PYTHONPATH.

    file: where it appends its records. allowed_plugins: the server's VLLM_PLUGINS, which must name the observer too.
    """
    variables = {FILE_VARIABLE: str(file)}
    if allowed_plugins is not None and PLUGIN_NAME not in allowed_plugins.split(","):
        variables["VLLM_PLUGINS"] = f"{allowed_plugins},{PLUGIN_NAME}"
    return variables
