"""A key reaches the server, and nothing that is kept or printed, whatever the server repeats of it."""

from __future__ import annotations

import base64
import html
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow.parquet as pq
import pytest

from harness.errors import printable
from harness.extras.otel.spans import collector_headers
from harness.measure.client.answer import ReceivedAnswer, describe_error_body
from harness.secrets import masked, note_secrets, without_secrets
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED
from tests.support.plain_server import METRICS, PlainServer, plain_server

KEY = 'sk-"it\'s"<b>&c/d+e=f%g\\h i'
PAIR = "somebody:pass/word?"
WAYS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": json.dumps,
    "JSON in JSON": lambda key: json.dumps(json.dumps(key)),
    "JSON with slashes": lambda key: json.dumps(key).replace("/", "\\/"),
    "JSON for HTML": lambda key: "".join(f"\\u{ord(each):04x}" if each in "<>&'" else each for each in key),
    "JSON, all escaped": lambda key: "".join(f"\\u{ord(each):04X}" for each in key),
    "Python": repr,
    "capitals": str.upper,
    "small letters": str.lower,
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal in capitals": lambda key: key.encode().hex(" ").upper(),
    "a dump": lambda key: key.encode().hex(":"),
    "URL": quote,
    "URL, all escaped": lambda key: "".join(f"%{ord(each):02x}" for each in key),
    "URL in a URL": lambda key: quote(quote(key, safe=""), safe=""),
    "form": quote_plus,
    "HTML": html.escape,
    "HTML in HTML": lambda key: html.escape(html.escape(key)),
    "HTML by number": lambda key: "".join(f"&#{ord(each)};" for each in key),
    "HTML by hexadecimal": lambda key: "".join(f"&#x{ord(each):X};" for each in key),
    **{
        f"base64 after {before!r}": lambda key, before=before: base64.b64encode(f"{before}{key}:".encode()).decode()
        for before in ("", ":", "me:", "me2:")
    },
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"u:{key}".encode()).decode(),
    "base64 in a URL": lambda key: quote(base64.b64encode(f"u:{key}".encode()).decode(), safe=""),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["sk-0123456789abcdef", KEY, "a.b*c(d[e?", "\\\\\\\\\\\\\\\\", "&amp;&lt;%41"])
def test_a_secret_is_replaced_in_whatever_way_it_is_written(key: str, way: str) -> None:
    note_secrets([key])
    written = f"key={WAYS[way](key)};"
    assert "redacted" in without_secrets(written)
    assert WAYS[way](key) not in without_secrets(written)
    assert without_secrets(written.encode()).decode() == without_secrets(written)
    assert len(masked(written.encode())) == len(written.encode())
    assert WAYS[way](key).encode() not in masked(written.encode())


def test_the_password_of_basic_authorization_is_a_secret_too() -> None:
    note_secrets([base64.b64encode(PAIR.encode()).decode()])
    assert (
        without_secrets(f"user {PAIR}, password {quote('pass/word?', safe='')}") == "user redacted, password redacted"
    )


def test_a_key_is_replaced_before_a_message_is_cut() -> None:
    note_secrets(["sk-cut-in-two-0123456789"])
    assert "sk-cut" not in printable("x" * 285 + " sk-cut-in-two-0123456789")


@pytest.mark.parametrize("before", [b"", b"<html>", b'{"error": '])
@pytest.mark.parametrize("at", [1150, 1190, 1199])
def test_a_key_is_replaced_before_the_body_of_an_error_is_cut(before: bytes, at: int) -> None:
    note_secrets(["sk-cut-in-two-0123456789"])
    body = before + b" " * (at - len(before)) + b"sk-cut-in-two-0123456789 and more"
    assert "sk-" not in describe_error_body(body)


def test_a_key_is_replaced_before_data_that_is_no_answer_is_cut() -> None:
    note_secrets(["sk-cut-in-two-0123456789"])
    answer = ReceivedAnswer(stream=True)
    answer.feed((1, b"", b"data: " + b"x" * 70 + b" sk-cut-in-two-0123456789\n\n"))
    assert "sk-" not in answer.problem


def test_a_word_that_servers_without_keys_take_changes_no_metric() -> None:
    note_secrets(["EMPTY", "vllm", "1"])
    assert without_secrets(METRICS) == METRICS


def test_headers_for_a_collector_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20of-the-collector, x-team = team-key-1")
    collector_headers()
    assert without_secrets("not of-the-collector, not team-key-1") == "not redacted, not redacted"


EXPERIMENT = """
name = "asked"
backend = "attached"
replicates = 1
[workload]
num_sessions = 2
waits = "none"
generate_tokens = {{distribution = "fixed", value = 4}}
[workload.request.headers]
x-gate = "{{env:GATE}}"
[client]
processes = {processes}
[server]
url = "{url}"
api_key_env = "THE_KEY"
replica_header = "X-Replica"
[limits]
{limits}
[[condition]]
name = "only"
"""


def texts_of(path: Path, content: bytes | None = None) -> str:
    """What a file holds, tables and archives unpacked."""
    content = path.read_bytes() if content is None else content
    if path.suffix == ".parquet":
        return repr(pq.read_table(io.BytesIO(content)).to_pylist())
    if path.suffix == ".zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return "".join(texts_of(Path(name), archive.read(name)) for name in archive.namelist())
    return content.decode("utf-8", "surrogateescape")


def repeated(secrets: list[str], text: str) -> list[str]:
    return [f"{way}: {secret}" for secret in secrets for way, write in WAYS.items() if write(secret) in text]


def repeating(secrets: list[str], num_good: int = 10**6) -> PlainServer:
    """A server that wants the first secret, and repeats all of them in every way, wherever it can."""
    everything = [write(each) for each in secrets for write in WAYS.values()]
    return PlainServer(
        gives_token_ids=True,
        has_metrics=True,
        key=secrets[0],
        metrics=METRICS + "".join(f"# HELP key {each}\n" for each in everything),
        version=" ".join(everything),
        repeats=json.dumps(secrets[-1]),
        fails=" ".join(everything),
        num_good=num_good,
    )


@pytest.mark.live
@pytest.mark.parametrize(
    ("num_good", "processes"),
    [(10**6, 1), (10**6, 2), (3, 1)],
    ids=["answers", "answers in two processes", "refuses"],
)
def test_nothing_that_a_server_repeats_of_a_key_is_kept_or_printed(
    num_good: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = "gate-" + KEY[::-1].strip()
    for name, text in {"THE_KEY": KEY, "GATE": gate}.items():
        monkeypatch.setenv(name, text)
    printed = ""
    with plain_server(repeating([KEY])) as server:
        for words in ("doctor", "--url"), ("init", "made", "--for"):
            done = harness(*words, server.url, "--api-key-env", "THE_KEY", cwd=tmp_path)
            printed += done.stdout + done.stderr
    secrets = [KEY, gate]
    with plain_server(repeating(secrets, num_good)) as server:
        limits = "\n".join(f"{name} = {json.dumps(value)}" for name, value in UNHURRIED.items())
        (tmp_path / "asked.toml").write_text(EXPERIMENT.format(url=server.url, limits=limits, processes=processes))
        for words in ("run", "asked.toml"), ("table", "asked"), ("report", "asked", "-o", "page.html"):
            done = harness(*words, cwd=tmp_path)
            printed += done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"requests.parquet", "scrapes.jsonl", "page.html"} <= {path.name for path in files}, printed
    assert {str(path): found for path in files if (found := repeated(secrets, texts_of(path)))} == {}
    assert repeated(secrets, printed) == []
    assert "redacted" in "".join(map(texts_of, files))
