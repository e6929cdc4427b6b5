"""Which values are secrets, and what stands for them in every file that the harness writes.

A secret reaches the server and nothing else: manifests, frozen files and reports hold the word "redacted". The
environment is not read here. Next: ``harness.spec`` dumps without secrets; backends fill them in to start a server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.errors import SpecError

REDACTED = "redacted"
# HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD; not TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSW|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"--[\w-]*(?:api-key|hf-token|password|secret)")
# As `--set` takes it: server.env.HF_TOKEN="..."
_SET_OF_ENV = re.compile(r"((?:\w+\.)*env\.(\w+))=.*", re.DOTALL)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a variable of this name is taken for a secret."""
    return _SECRET_NAME.search(name) is not None


def redacted_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a record: no secret, and no user and password in a URL."""
    return {
        name: REDACTED if is_secret(name) else _USER_OF_URL.sub(f"{REDACTED}@", str(value))
        for name, value in env.items()
    }


def redacted_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Command words for a record: ``--api-key X``, ``--api-key=X`` and ``server.env.HF_TOKEN=X`` lose their value."""
    kept: list[str] = []
    hides_next = False
    for word in words:
        if (setting := _SET_OF_ENV.fullmatch(word)) and is_secret(setting[2]):
            word = f"{setting[1]}={REDACTED}"
        name, equals, _ = word.partition("=")
        is_option = _SECRET_OPTION.fullmatch(name) is not None
        kept.append(REDACTED if hides_next else f"{name}={REDACTED}" if is_option and equals else word)
        hides_next = is_option and not equals
    return tuple(_USER_OF_URL.sub(f"{REDACTED}@", word) for word in kept)


def filled_env(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a server that is about to start: what was redacted in a record comes from ``own``, by its name.

    Raises SpecError naming a variable that is not there.
    """
    filled: dict[str, str] = {}
    for name, value in env.items():
        if value == REDACTED and is_secret(name):
            if name not in own:
                raise SpecError(
                    "was redacted when this experiment was recorded, and is not in the environment",
                    where=f"server.env.{name}",
                    hint=f"export {name} and run again",
                )
            value = own[name]
        filled[name] = value
    return filled
