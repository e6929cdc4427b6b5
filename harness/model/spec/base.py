"""What all specifications share: frozen models that refuse unknown keys, names that can be folders, reading of TOML.

Problems name their key and line as a person finds them in the file. Nothing here knows an experiment.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from harness.errors import SpecError

if TYPE_CHECKING:
    from typing_extensions import Self

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath: TypeAlias = tuple[int | str, ...]
"""A key by the tables around it: ("condition", 1, "server", "kv_slots")."""

_HEADING = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\"' -]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\"'-]+(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")


NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")


NUMBERS, BOOLS = frozenset((int, float)), frozenset((bool,))


class Spec(BaseModel):
    """Base of all specifications: frozen, and an unknown key is an error."""

    # Validators are built at first use: many commands read no experiment.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_bools_apart(cls, table: Any) -> Any:
        """Pydantic would take true as 1, and "yes" and 1 as true; as another type, each is refused with its key."""
        if not isinstance(table, Mapping):
            return table
        given = cast("Mapping[str, Any]", table)
        wrong: dict[str, Any] = {
            key: str(value).lower()
            for key, value in given.items()
            if isinstance(value, bool) and _takes_only(cls, key, NUMBERS)
        }
        wrong |= {
            key: [value]
            for key, value in given.items()
            if isinstance(value, (str, int, float)) and not isinstance(value, bool) and _takes_only(cls, key, BOOLS)
        }
        return {**given, **wrong} if wrong else given

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str, hint: str = "") -> Self:
        """The specification in a table; raises SpecError naming every key that is wrong."""
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise SpecError(describe_validation_error(error), where=where, hint=hint) from error


@lru_cache(maxsize=4096)
def _takes_only(model: type[BaseModel], key: str, kinds: frozenset[Any]) -> bool:
    """Whether a key of a model takes values of these kinds alone, or none."""
    if key not in model.model_fields:
        return False
    annotation = model.model_fields[key].annotation
    taken = set(get_args(annotation) or (annotation,)) - {type(None)}
    return bool(taken) and taken <= kinds


def check_name(name: str) -> str:
    """Names become folders: lower case, digits, dot, dash, underscore."""
    if not NAME_PATTERN.match(name):
        raise ValueError(f"name {name!r} must match {NAME_PATTERN.pattern}")
    return name


Name = Annotated[str, AfterValidator(check_name)]


def _check_devices(devices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(devices)) != len(devices) or any(device < 0 for device in devices):
        raise ValueError(f"devices must be distinct and not negative, got {list(devices)}")
    return devices


DeviceNumbers = Annotated[tuple[int, ...], AfterValidator(_check_devices)]
"""Numbers of NPUs of one host, without repetition."""


def _did_you_mean(root: type[BaseModel] | None, path: KeyPath) -> str:
    """ " (did you mean ...?)": the key of the model at ``path`` that is spelled most like its last part."""
    model = root
    for part in path[:-1]:
        field = None if model is None or isinstance(part, int) else model.model_fields.get(part)
        if isinstance(part, str):
            if field is not None and root is not None and model is not root:
                field = root.model_fields.get(part, field)  # a condition's [server] has the keys of ServerSpec
            kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    near = [] if model is None else difflib.get_close_matches(str(path[-1]), model.model_fields, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


MOST_TOML_BYTES = 1 << 20
# The parser takes the square of the parts of a key.
_DEEP_KEY = re.compile(rb"""(?<![\w."'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){100}""")


def load_toml(path: Path, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The table in a TOML file; every failure is a SpecError that names the file and the line.

    parse_float: makes the value of a number with a point or an exponent; it may refuse it with a ValueError.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_TOML_BYTES + 1)
        if len(content) > MOST_TOML_BYTES or _DEEP_KEY.search(content):
            what = f"longer than {MOST_TOML_BYTES >> 20} MiB" if len(content) > MOST_TOML_BYTES else "a key is too long"
            raise SpecError(f"cannot be read as TOML: {what}", where=str(path), hint="Shorten it")
        return tomllib.loads(content.decode("utf-8"), parse_float=parse_float)
    except OSError as error:
        raise SpecError(f"cannot be read ({error.strerror})", where=str(path), hint="Check the path") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"is not UTF-8 text (byte {error.start})", where=str(path), hint="Save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"is not valid TOML: {error}", where=str(path), hint="Correct that line") from error
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "a number in it is too long"
        raise SpecError(f"cannot be read as TOML: {what}", where=str(path), hint="Shorten it") from error


# Pydantic's messages for programmers, reworded for a TOML file.
_PLAIN = {
    "missing": "is missing",
    "tuple_type": "must be a list, e.g. [1, 2, 4]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "union_tag_not_found": 'needs a distribution, e.g. { distribution = "uniform", low = 1, high = 9 }',
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text, in quotes",
}


Problem: TypeAlias = tuple[KeyPath, str]
"""A key, and what is wrong with its value."""


def problems_of(error: ValidationError, model: type[BaseModel] | None = None, at: KeyPath = ()) -> list[Problem]:
    """The problems in one pydantic error, each with its key.

    model: its keys are suggested for a misspelt key. at: path of the value that was validated.
    """
    return [(path, _in_words(item, model, path)) for item in error.errors() for path in [(*at, *item["loc"])]]


def _in_words(item: ErrorDetails, model: type[BaseModel] | None, path: KeyPath) -> str:
    kind = item["type"]
    if kind == "extra_forbidden":
        return "unknown key" + _did_you_mean(model, path)
    if kind == "union_tag_invalid":
        tag, tags = (str(item.get("ctx", {}).get(name)) for name in ("tag", "expected_tags"))
        near = difflib.get_close_matches(tag, re.findall(r"[\w-]+", tags), n=1)
        key = str(item.get("ctx", {}).get("discriminator", "")).strip("'")
        return f"{key} {tag!r} is not one of {tags}" + (f" (did you mean {near[0]}?)" if near else "")
    if kind == "tuple_type" and isinstance(item["input"], Mapping):
        return f"is a table and must be a list of tables: write [[{path[-1]}]], in double brackets"
    return _PLAIN.get(kind, item["msg"].removeprefix("Value error, ").replace("Input should be", "must be"))


def format_problems(
    problems: Iterable[Problem], *, table: Mapping[str, Any] | None = None, file: Path | None = None
) -> str:
    """All problems in one line, sorted by line number, without repetition.

    table: the parsed file, to name the elements of lists. file: where it was written, for line numbers. A value that
    the table does not have from the file was set on the command line, and is called so.
    """
    lines = {} if file is None else key_lines(file)
    written = load_toml(file) if lines and file is not None else {}
    line_numbers: dict[str, int] = {}
    for path, message in problems:
        # As text: nan is not equal to itself.
        is_set = bool(lines) and repr(_value_at(path, table)) != repr(_value_at(path, written))
        line = None if is_set else line_of(path, lines)
        prefix = "--set " if is_set else "" if line is None else f"line {line}: "
        text = f"{prefix}{key_name(path, table)}: {message}" if path else message
        line_numbers.setdefault(text, line or 0)
    # A key may contain anything, also line breaks.
    return " ".join("; ".join(sorted(line_numbers, key=lambda text: line_numbers[text])).split())


def _value_at(path: KeyPath, table: object) -> object:
    """The value at a path of a parsed file; None where it has none."""
    for part in path:
        table = _inner(table, part)
    return table


def describe_validation_error(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems of one pydantic error in one line, each with its key. model: as for ``problems_of``."""
    return format_problems(problems_of(error, model))


def key_lines(path: Path) -> dict[KeyPath, int]:
    """Line, from 1, of each heading and key of a TOML file; empty where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _HEADING.match(line):
            table = _parts(heading[2])
            if heading[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            elif table[:1] in counts:  # [condition.server] belongs to the latest [[condition]]
                table = (*table[:1], counts[table[:1]], *table[1:])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_parts(key[1])), number)
    return lines


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """The line of a key, or of the nearest table around it that has a line."""
    return next((lines[path[:size]] for size in range(len(path), 0, -1) if path[:size] in lines), None)


def key_name(path: KeyPath, table: Mapping[str, Any] | None) -> str:
    """ "condition[twelve].server.kv_slots": an element of a list is called by its name, where it has one."""
    text = ""
    value: object = table
    for part in path:
        inner = _inner(value, part)
        if isinstance(part, int):
            name = cast("Mapping[str, object]", inner).get("name") if isinstance(inner, Mapping) else None
            text += f"[{name}]" if isinstance(name, str) else f"[{part}]"
        else:
            text += f".{part}" if text else part
        value = inner
    return text


def _inner(value: object, part: int | str) -> object:
    if isinstance(part, str):
        return cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return cast("Sequence[object]", value)[part] if is_list and part < len(cast("Sequence[object]", value)) else None


def _parts(dotted: str) -> KeyPath:
    return tuple(part.strip(" \"'") for part in dotted.split("."))
