"""The client's secrets: keys that this process has read to send them, and what comes in without them.

A server may repeat a key wherever it writes: in metrics, errors, names, logs. Everything that comes in passes
``without_secrets`` before it is kept or printed. Nothing here is ever recorded.
"""

from __future__ import annotations

import base64
import html.entities
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import AnyStr

REDACTED = "redacted"
SHORTEST = 6
"""Characters of a secret that is looked for: replacing a shorter one, as the usual "EMPTY", would change data."""
_BASIC = re.compile(r"[A-Za-z0-9+/_-]{4,}={0,2}")
_noted: set[str] = set()


def environment_secret(name: str) -> str:
    """The secret in an environment variable, noted; "" where there is none that a header can carry."""
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isprintable():
        return ""
    note_secrets([text])
    return text


def note_secrets(texts: Iterable[str]) -> None:
    """From now on, ``without_secrets`` replaces these texts."""
    for text in texts:
        found = {text, *_of_basic(text)}
        _noted.update(each.strip() for each in found if len(each.strip()) >= SHORTEST)


def noted_secrets() -> tuple[str, ...]:
    """What was noted, for a process that asks in this one's place."""
    return tuple(sorted(_noted))


def without_secrets(data: AnyStr) -> AnyStr:
    """``data`` with the word "redacted" for every secret: as it is, in capitals or small letters, escaped as JSON,
    URLs, HTML or Python do, in hexadecimal, or inside base64 (as of Basic authorization)."""
    if not _noted:
        return data
    pattern, in_bytes = _patterns(noted_secrets())
    return pattern.sub(REDACTED, data) if isinstance(data, str) else in_bytes.sub(REDACTED.encode(), data)


def masked(data: bytes) -> bytes:
    """As ``without_secrets``, with asterisks, so that every byte keeps its place: for files whose offsets are kept."""
    return _patterns(noted_secrets())[1].sub(lambda found: b"*" * len(found[0]), data) if _noted else data


def _of_basic(text: str) -> tuple[str, ...]:
    """User with password, and the password alone, where a secret is the base64 of Basic authorization."""
    if not _BASIC.fullmatch(text):
        return ()
    try:
        pair = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_" if {"-", "_"} & set(text) else None)
        decoded = pair.decode("ascii")
    except ValueError:
        return ()
    return (decoded, decoded.partition(":")[2]) if ":" in decoded and decoded.isprintable() else ()


@lru_cache(maxsize=4)
def _patterns(secrets: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[bytes]]:
    # The longest first: a secret may be part of another one.
    longest_first = sorted(secrets, key=len, reverse=True)
    ways = (_escaped, _in_hexadecimal, _in_base64)
    text = "|".join(way(secret) for way in ways for secret in longest_first)
    return re.compile(text), re.compile(text.encode())


def _escaped(secret: str) -> str:
    """A pattern of a secret, each of its characters written in any way, as a capital or a small letter."""
    return f"(?i:{''.join(map(_written, secret))})"


def _in_hexadecimal(secret: str) -> str:
    """A pattern of the secret's bytes as two digits each; spaces, colons and the like may stand between them."""
    return r"(?:[ :,-]|\\?0?x)?".join(_hexadecimal(ord(character)) for character in secret)


def _hexadecimal(code: int) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in f"{code:02x}")


def _written(character: str) -> str:
    code = ord(character)
    hexadecimal = _hexadecimal(code)
    names = [name for name, meaning in html.entities.html5.items() if meaning == character and name.endswith(";")]
    forms = [
        rf"\\{{0,8}}{re.escape(character)}",
        rf"\\{{1,8}}(?:u00|x){hexadecimal}",
        f"%(?:25)*{hexadecimal}",
        f"&(?:amp;)*(?:#0*{code};?|#[xX]0*{hexadecimal};?{''.join('|' + re.escape(name) for name in names)})",
        *([r"\+"] if character == " " else []),
    ]
    return f"(?:{'|'.join(forms)})"


def _in_base64(secret: str) -> str:
    """A pattern of base64 that holds the secret after any other bytes; the rest of the word goes too."""
    cores: list[str] = []
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + secret.encode()).decode()
        core = encoded[-(-before * 4 // 3) : (before + len(secret)) * 4 // 3]
        cores.append("".join(_base64_digit(digit) for digit in core))
    return f"(?:{'|'.join(cores)})[A-Za-z0-9+/_=-]*"


def _base64_digit(digit: str) -> str:
    other = {"+": "|-", "/": "|_"}.get(digit, "")
    return f"(?:{_written(digit)}{other})" if other else digit
