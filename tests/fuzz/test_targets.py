"""Whatever lies in a file that the harness reads, its parser answers with a value or one clear line."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.fuzzer import Fuzzer, alarmed
from tests.fuzz.targets import Target, targets

NUM_INPUTS = 30
# What draws its own texts has a test of its own.
TARGETS = [target for target in targets() if target.draw is None]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_parser_answers_changed_texts_with_a_value_or_one_line(target: Target) -> None:
    with alarmed() as folder:
        fuzzer = Fuzzer(target, folder / "input.toml", random.Random(13))
        fuzzer.warm_up()
        for content in (*target.seeds, *(fuzzer.next_input() for _ in range(NUM_INPUTS))):
            find = fuzzer.try_input(content)
            assert find is None, f"{find.what}\n{find.content[:300]!r}"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("cost model", b"per_call_ms = ", b"per_call_ms = 1e999999999 #"),
        ("cost model", b"per_call_ms = ", b"per_call_ms = 1e-999999999 #"),
        ("cost model", b"fitted_tokens = [", b"fitted_tokens = [1e999999999, "),
        ("simulation cases", b"0.02}}", b"1e-300}}"),
        ("emulator configuration", b'["crash-after-steps=3"]', b"[5, null]"),
        ("artifact", b"[1, 2, 4, 8]", b"[1, %b]" % (b"9" * 300)),
        ("search space", b"max_num_seqs = [", b"max_num_seqs = [9223372036854775808, "),
        ("patch", b"-1,3", b"-1,%b" % (b"9" * 5000)),
        ("ledger", b"2026-01-01T", b"0001-01-01T"),
        ("release wheel", b"vllm_rbln-0.12.0.dist-info", b"vllm_rbln-0.12.0\n.dist-info"),
        ("changes", b"server.kv_slots=16", b"a" + b".a" * 5000 + b"=16"),
        ("observer", b'"columns"', b'"other"'),
        ("observer", b'[[1, "c"]]', b"[[]]"),
        ("observer", b"[0, 1,", b"[0, 1e300,"),
        ("observer", b"[0, 1,", b"[%b," % (b"9" * 30)),
        ("log and scrapes of a run that goes on", b"num_requests_running 2", b"num_requests_running inf"),
        ("recording, codex", b"2026-03-01T10:00:00.000Z", b"9999-12-31T23:59:59Z"),
        ("completion request", b'"max_tokens": 4', b'"max_tokens": %b' % (b"9" * 5000)),
    ],
)
def test_what_was_found_once_is_one_line_or_a_value(name: str, old: bytes, new: bytes) -> None:
    (target,) = (one for one in TARGETS if one.name == name)
    changed = [seed.replace(old, new, 1) for seed in target.seeds if old in seed]
    assert changed
    with alarmed() as folder:
        fuzzer = Fuzzer(target, folder / "input.toml", random.Random(1))
        assert [find for content in changed if (find := fuzzer.try_input(content)) is not None] == []
