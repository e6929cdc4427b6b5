"""``harness explain``: every key of what people write, and every column of what runs leave.

Words, choices and defaults are read from the specs and schemas themselves.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from harness.cli.addresses import output_option
from harness.cli.terminal import print_folded, print_or_write, print_text, print_with_comment, show, terminal
from harness.errors import SpecError
from harness.table import Table

if TYPE_CHECKING:
    from pydantic import BaseModel

# Where the keys of a topic stand in a file, if not in the table of its name.
PLACES = {
    "experiment": "the top of an experiment file",
    "group": "[[workload.group]]",
    "condition": "[[condition]]",
    "emulated": "[fleet.emulated.DEVICE]",
    "waits": "the top of a file of waits",
    "tool": "[[tool]]",
    "fixed": 'distribution = "fixed"',
    "uniform": 'distribution = "uniform"',
    "lognormal": 'distribution = "lognormal"',
    "router": "[server.router]",
    "excluded": "[[excluded]]",
}
FILES = {
    "rule": "file of a decision rule",
    "costs": "file of costs",
    "space": "file of a search",
    "compile": "file of harness server compile",
}
"""Files beside experiments, each with its tables: topics begin with the name of the file."""
LENGTHS = ("fixed", "uniform", "lognormal")
OF_WAITS = "waits."
"""What the topics of distributions of waits begin with: a length has some of the same names."""


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC",
            help="`experiment`, a table or key of it (`server.kv_slots`), `distributions`; other files: `waits`, "
            "`rule`, `costs`, `space`, `compile`; `tables`: columns of runs; a finding (`clock-moved`), or "
            "`findings`; a word of reports (`re-arrival`), or `glossary`.",
        ),
    ] = None,
    output: Annotated[Path | None, output_option("`tables`, `findings`, `glossary`: a Markdown file for it.")] = None,
) -> None:
    """Keys of files, columns of records, findings, words of reports.

    Keys with their meaning, choices, unit and default.

    Example: `harness explain workload`
    """
    from harness.measure.records.findings import finding_rows, findings_markdown
    from harness.measure.records.schema import dictionary_markdown
    from harness.present.report.glossary import entries, entries_of, markdown

    topic, models = " ".join(words or ["experiment"]), _models()
    lists = {"tables": _explain_tables, "findings": _explain_findings, "glossary": _explain_words}
    pages = {"tables": dictionary_markdown, "findings": findings_markdown, "glossary": markdown}
    if topic in lists:
        lists[topic]() if output is None else print_or_write(pages[topic](), output)
    elif topic in finding_rows():
        _explain_findings(topic)
        _explain_key(topic, models)
    elif topic not in models and not _tables_with(topic, models) and entries_of(topic):
        _explain_words(topic)
    elif topic == "distributions":
        _explain_distributions(models)
    elif topic in FILES:
        for name in models:
            if name.partition(".")[0] == topic:
                _explain_model(name, models[name])
    elif topic in models:
        _explain_model(topic, models[topic])
        _explain_more(topic)
    elif _tables_with(topic, models):
        _explain_key(topic, models)
        _explain_more(topic.rpartition(".")[2])
    else:
        keys = [f"{table}.{key}" for table, model in models.items() for key in model.model_fields]
        bare = {key for model in models.values() for key in model.model_fields}
        words = [word for entry in entries() for word in entry.words]
        near = difflib.get_close_matches(topic, [*_topics(), *models, *bare, *keys, *finding_rows(), *words], n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise SpecError(f"nothing is known of {topic!r}", where="explain", hint=f"{hint}Topics: {', '.join(_topics())}")


def _explain_key(topic: str, models: Mapping[str, type[BaseModel]]) -> None:
    for table in _tables_with(topic, models):
        _explain_model(table, models[table], only=topic.rpartition(".")[2])


def _explain_distributions(models: Mapping[str, type[BaseModel]]) -> None:
    print_folded("A length: { distribution = ..., ... }, in tokens.\n")
    for name in LENGTHS:
        _explain_model(name, models[name])
    print_folded("Waits: in [waits] of a file of waits, or in [[tool]] with its calls.\n")
    for name in models:
        if name.startswith(OF_WAITS):
            _explain_model(name, models[name])


@cache
def _models() -> dict[str, type[BaseModel]]:
    from harness.model import spec
    from harness.model.plan import waits
    from harness.model.spec.server import RouterSpec

    of_waits = (
        *(waits.ConstantWait, waits.NoWait, waits.LognormalWait, waits.ExponentialWait, waits.EmpiricalWait),
        waits.MixtureWait,
    )
    models: dict[str, type[BaseModel]] = {
        "experiment": spec.ExperimentSpec,
        "workload": spec.WorkloadSpec,
        "request": spec.RequestSpec,
        "group": spec.SessionGroup,
        "server": spec.ServerSpec,
        "condition": spec.ConditionSpec,
        "client": spec.ClientSpec,
        "limits": spec.LimitsSpec,
        "slo": spec.SloSpec,
        "window": spec.WindowSpec,
        "prediction": spec.PerturbationSpec,
        "stop": spec.StopSpec,
        "tune": spec.TuneSpec,
        "fleet": spec.FleetSpec,
        "emulated": spec.EmulatedDevice,
        "waits": waits.WaitFile,
        "tool": waits.ToolRow,
        "excluded": waits.ExcludedTool,
        "router": RouterSpec,
        "fixed": spec.FixedLength,
        "uniform": spec.UniformLength,
        "lognormal": spec.LognormalLength,
        **{f"{OF_WAITS}{get_args(model.model_fields['distribution'].annotation)[0]}": model for model in of_waits},
    }
    for name, model in _files():
        models |= dict(_with_tables(name, model, {*models.values()}))
    return models


def _files() -> Iterator[tuple[str, type[BaseModel]]]:
    """The specification of each kind of file of FILES; a search only where its plug-in is."""
    from harness.model.engine.cost import CostFile
    from harness.model.spec.rules import RULE_KINDS
    from harness.plugins import plugged, service
    from harness.stacks.rbln.launch.compile import CompileSpec

    yield from ((f"rule.{kind}", model) for kind, model in RULE_KINDS.items())
    yield "costs", CostFile
    if "search space" in plugged("services"):
        yield "space", service("search space", where="explain")
    yield "compile", CompileSpec


def _with_tables(
    name: str, model: type[BaseModel], known: Collection[type[BaseModel]]
) -> Iterator[tuple[str, type[BaseModel]]]:
    """A specification and those of its tables, at any depth, that no topic has yet."""
    from pydantic import BaseModel

    yield name, model
    for key, field in model.model_fields.items():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in known:
                yield from _with_tables(f"{name}.{key}", part, known)


def _tables_with(topic: str, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """The tables that hold the key of TABLE.KEY, as errors name it, or of KEY alone."""
    *_, table, key = "", *topic.split(".")
    having = (name for name, model in models.items() if key in model.model_fields)
    is_file = table in FILES or table == "waits"
    return [
        name
        for name in having
        if not table or f".{name}".endswith(f".{table}") or (is_file and name.startswith(f"{table}."))
    ]


def _topics() -> list[str]:
    tables = [name for name in _models() if "." not in name and name not in {*LENGTHS, *FILES}]
    return [*tables, *FILES, "distributions", "tables", "findings", "glossary"]


def _explain_model(topic: str, model: type[BaseModel], only: str = "") -> None:
    from harness.model.spec.server import key_in_words

    about = " ".join((model.__doc__ or "").split())
    file, _, table = topic.partition(".")
    places = {"waits": f'[waits] distribution = "{table}"', "rule": f'{FILES["rule"]}, kind = "{table}"'}
    place = f"[{topic}]"
    if file in (*FILES, "waits"):
        place = places.get(file) or f"{FILES[file]}, {f'[{table}]' if table else 'its top'}"
    print_folded(f"{PLACES.get(topic, place)}  {about}\n")
    document = model.model_json_schema()
    for name, key in document["properties"].items():
        if only not in ("", name):
            continue
        is_required = name in document.get("required", ())
        default = json.dumps(key["const"]) if "const" in key else "required" if is_required else _default(model, name)
        meaning = key_in_words(name) if topic == "server" else key.get("description", "")
        notes = [note for note in (meaning, _allowed(key)) if note]
        print_with_comment(f"{name} = {default}", "; ".join(notes))
    print_text()


def _default(model: type[BaseModel], name: str) -> str:
    """The default as TOML has it; what is left open is "not set"."""
    value = model.model_fields[name].get_default(call_default_factory=True)
    if name in _models() and name != "waits":
        return f"see harness explain {name}"
    if (own := next((topic for topic, table in _models().items() if type(value) is table), None)) is not None:
        return f"see harness explain {own}"
    if value is None:
        return "(not set)"
    return json.dumps(value, default=lambda part: part.model_dump() if hasattr(part, "model_dump") else float(part))


def _allowed(key: Mapping[str, Any]) -> str:
    """What a key takes, from its JSON schema: choices, or ends of a range."""
    options = [key, *key.get("anyOf", ())]
    for option in options:
        if "enum" in option:
            return "one of " + ", ".join(str(choice) or '""' for choice in option["enum"])
        if "discriminator" in option:
            distributions = option["discriminator"]["mapping"]
            more = ": harness explain distributions" if "uniform" in distributions else ""
            return f"a distribution of {', '.join(distributions)}{more}"
    ends = [
        f"{sign} {option[word]:g}"
        for option in options
        for word, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if word in option
    ]
    return " and ".join(ends)


def _explain_more(topic: str) -> None:
    from harness.judge.catalogue import analyses
    from harness.stacks.rbln.rules.kv_rules import rules_in_words

    if topic == "analysis":
        for analysis in analyses().values():
            print_folded(f"{analysis.name:<20}  {analysis.meaning}", hang=22)
    if topic == "server":
        print_folded(f"Rules:\n{rules_in_words()}")
    if topic == "experiment":
        print_folded("More: harness explain " + " | ".join(name for name in _topics() if name != "experiment"))
    if topic == "waits":
        print_folded("Shipped and imported ones: harness plan waits show, harness plan waits import.")


def _explain_findings(code: str = "") -> None:
    """A finding by its code, or all of them."""
    from harness.measure.records.findings import finding_rows

    for name, row in finding_rows().items():
        if code in ("", name):
            move = f" {row.do}." if row.do else ""
            more = f" (docs/{row.see})" if row.see else ""
            print_folded(f"{name} ({' or '.join(row.severities)}): {row.means}{move}{more}")


def _explain_words(word: str = "") -> None:
    """Each entry that explains the word, or all of them."""
    from harness.present.report.glossary import entries, entries_of

    for entry in entries_of(word) if word else entries():
        print_text(f"{entry.plain_term}\n  {entry.plain_meaning}\n  (docs/reference/method*.md, {entry.section})\n")


def _explain_tables() -> None:
    from harness.measure.records.schema import EXPLAINED_TABLES, INTRODUCTION, explained

    print_folded(" ".join(INTRODUCTION.split()))
    out = terminal()
    for name, (row, _columns) in EXPLAINED_TABLES.items():
        rows = tuple((column, unit, meaning) for column, _type, unit, meaning in explained(name))
        show(out, Table(f"\n{name}: {row}", "", ("column", "unit", "meaning"), rows))
