"""Installs packages with uv, with pip's settings and the same hashes, several times as fast as pip.

It names no package index. The caller decides what follows a failure; pip can do the same. It uses the standard library
alone, because the set-up of a checkout runs it before anything is installed.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

UV_LOCK = Path(__file__).with_name("requirements-uv.lock")
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
"""By pip's name of a setting: uv's variable, and its separator between several values."""


def uv_install(python: str, *installs: Sequence[str]) -> None:
    """One ``uv pip install`` after another into the environment of ``python``, which has pip and gets uv by its hash.

    installs: the arguments of each. Raises OSError, or subprocess.CalledProcessError with the output.
    """
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    # One retry: without a network, pip would come to the same end much later.
    _output([*pip, "install", "--retries", "1", "--require-hashes", "--only-binary", ":all:", "-r", str(UV_LOCK)])
    settings = pip_settings(_output([*pip, "config", "list"]))
    uv = [str(Path(python).with_name("uv")), "pip", "install", "--quiet", "--python", python]
    no_index = ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    for arguments in installs:
        _output([*uv, *no_index, *arguments], {**os.environ, **uv_environment(settings)})


def pip_settings(listing: str) -> dict[str, str]:
    """The settings of ``pip install``, by name, from the output of ``pip config list``.

    The environment overrides the section of the command, which overrides the global section.
    """
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            name, is_setting, value = line.partition("=")
            if is_setting and name.startswith(section):
                settings[name.removeprefix(section)] = str(ast.literal_eval(value))
    return settings


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for pip's ``settings``; variables of uv that are already set stay."""
    # pip takes a package from whichever index has it, and trusts the certificates of the system.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1"}
    for name, (variable, separator) in UV_VARIABLES.items():
        if settings.get(name, "").split():
            variables[variable] = separator.join(settings[name].split())
    return {**variables, **{name: value for name, value in os.environ.items() if name.startswith("UV_")}}


def _output(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        check=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.stdout
