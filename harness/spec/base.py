"""What all written things share: models that refuse unknown keys, names that can be folders, TOML that names its file.

Frozen once read; nothing here knows an experiment.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from harness.errors import SpecError
from harness.spec.places import Place, key_lines, key_name, line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")


class Spec(BaseModel):
    """Base of everything a person writes: frozen, and an unknown key is an error."""

    # Checkers are made when something is first checked: many commands read no experiment.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, table: Any) -> Any:
        """true would be taken as 1; as text it is refused at its own place."""
        if not isinstance(table, Mapping):
            return table
        given = cast("Mapping[str, Any]", table)
        wrong = {
            key: str(value).lower()
            for key, value in given.items()
            if isinstance(value, bool) and key in cls.model_fields and _is_number(cls.model_fields[key].annotation)
        }
        return {**given, **wrong} if wrong else given


def _is_number(annotation: Any) -> bool:
    kinds = set(get_args(annotation) or (annotation,)) - {type(None)}
    return bool(kinds) and kinds <= {int, float}


def check_name(name: str) -> str:
    """Names become folders: lower case, digits, dot, dash, underscore."""
    if not NAME_PATTERN.match(name):
        raise ValueError(f"name {name!r} must match {NAME_PATTERN.pattern}")
    return name


def _check_devices(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(devices)) != len(devices) or any(device < 0 for device in devices):
        raise ValueError(f"devices must be distinct and not negative, got {list(devices)}")
    return devices


DeviceNumbers = Annotated[tuple[int, ...], AfterValidator(_check_devices)]
"""NPUs of one host by their numbers, each once."""


def _did_you_mean(root: type[BaseModel] | None, place: Place) -> str:
    """ " (did you mean ...?)", the key of the model at ``place`` that is spelled most like its last part."""
    model = root
    for part in place[:-1]:
        field = None if model is None or isinstance(part, int) else model.model_fields.get(part)
        if isinstance(part, str):
            if field is not None and root is not None and model is not root:
                field = root.model_fields.get(part, field)  # a condition's changes of the server are its keys
            kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    near = [] if model is None else difflib.get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


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


# pydantic's words for programmers, in the words of a file.
_PLAIN = {
    "missing": "is missing",
    "tuple_type": "must be a list, e.g. [1, 2, 4]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "union_tag_not_found": 'needs a law, e.g. { law = "uniform", low = 1, high = 9 }',
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text, in quotes",
}


Problem: TypeAlias = tuple[Place, str]
"""Where something is wrong, and what, in the words of a file."""


def problems_of(error: ValidationError, model: type[BaseModel] | None = None, at: Place = ()) -> list[Problem]:
    """What one pydantic error found, each at its place.

    model: whose keys a misspelt one may mean. at: where in it that stands which was checked.
    """
    return [(place, _in_words(item, model, place)) for item in error.errors() for place in [(*at, *item["loc"])]]


def _in_words(item: ErrorDetails, model: type[BaseModel] | None, place: Place) -> str:
    kind = item["type"]
    if kind == "extra_forbidden":
        return "unknown key" + _did_you_mean(model, place)
    if kind == "union_tag_invalid":
        tag, tags = (str(item.get("ctx", {}).get(name)) for name in ("tag", "expected_tags"))
        near = difflib.get_close_matches(tag, re.findall(r"[\w-]+", tags), n=1)
        return f"{tag!r} is none of {tags}" + (f" (did you mean {near[0]}?)" if near else "")
    if kind == "tuple_type" and isinstance(item["input"], Mapping):
        return f"is one table and must be a list of tables: write [[{place[-1]}]], in double brackets"
    return _PLAIN.get(kind, item["msg"].removeprefix("Value error, ").replace("Input should be", "must be"))


def told(problems: Iterable[Problem], *, table: Mapping[str, Any] | None = None, file: Path | None = None) -> str:
    """Problems in one line, each once, in the order of their lines.

    table: what was written, to name the elements of lists. file: where it was written, for the line of each problem.
    """
    lines = {} if file is None else key_lines(file)
    said: dict[str, int] = {}
    for place, message in problems:
        line = line_of(place, lines)
        at = "" if line is None else f"line {line}: "
        said.setdefault(f"{at}{key_name(place, table)}: {message}" if place else message, line or 0)
    # A key may hold anything, line breaks too.
    return " ".join("; ".join(sorted(said, key=lambda one: said[one])).split())


def describe_validation_error(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems of one pydantic error in one line, each with its key. model: whose keys a misspelt one may mean."""
    return told(problems_of(error, model))
