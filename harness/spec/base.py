"""What all written things share: models that refuse unknown keys, names that can be folders, TOML that names its file.

Frozen once read; nothing here knows an experiment. Next: the other files of ``harness.spec`` define what people write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")


class Spec(BaseModel):
    """Base of everything a person writes: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def check_name(name: str) -> str:
    """Names become folders: lower case, digits, dot, dash, underscore."""
    if not NAME_PATTERN.match(name):
        raise ValueError(f"name {name!r} must match {NAME_PATTERN.pattern}")
    return name


def load_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file; every failure is a SpecError that names the file and the line."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"is not UTF-8 text (byte {error.start})", where=str(path), hint="Save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is not valid TOML: {error}", where=str(path), hint="Mend the line named") from error
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "a number in it is too long"
        raise SpecError(f"is no TOML that can be read: {what}", where=str(path), hint="Shorten it") from error


def describe_validation_error(error: ValidationError) -> str:
    """All problems of one pydantic error in one line, each with its key."""
    problems: list[str] = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        problems.append(f"{key}: {message}" if key else message)
    return "; ".join(problems)
