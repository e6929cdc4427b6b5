"""Artifacts are compiled once, whole or not at all, and a stale or damaged one is never served."""

from __future__ import annotations

import fcntl
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ServerError, SpecError
from harness.stacks.rbln.launch import compile as compile_module
from harness.stacks.rbln.launch.compile import (
    CompilerFailedError,
    CompileSpec,
    Exporter,
    compile_artifact,
    list_artifacts,
    load_compile_spec,
    registered_artifact,
    require_fresh,
)
from tests.support.command_line import harness
from tests.support.processes import comes_true, ends
from tests.support.stacks import write_artifact

SPEC = CompileSpec(model="Qwen/Qwen3-4B")
# Exports as the real script does: specification in, folder out; counts how often it was called.
SCRIPT = """
import json, sys
from pathlib import Path
from typing import Any
{write_artifact}
spec, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
with open({calls!r}, "a") as calls:
    calls.write("x")
{extra}
write_artifact(
    folder,
    batch_size=spec["batch_size"],
    max_seq_len=spec["max_seq_len"],
    decoder_batch_sizes=spec["decoder_batch_sizes"][::-1],
    kvcache_num_blocks=spec["kvcache_num_blocks"],
    _compile_cfgs=[dict(npu=spec["npu"], num_devices=spec["num_devices"])],
)
"""


def _exporter(tmp_path: Path, extra: str = "") -> Exporter:
    script = tmp_path / "export.py"
    script.write_text(
        SCRIPT.format(write_artifact=inspect.getsource(write_artifact), calls=str(tmp_path / "calls"), extra=extra)
    )
    return Exporter(
        Path(sys.executable), script, {"optimum-rbln": "0.11.1", "rebel-compiler": "0.11.1"}, {}, free_gib=0.001
    )


def _calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text())


def _left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix not in (".lock", ".log"))


def test_the_same_specification_is_compiled_once(tmp_path: Path) -> None:
    root, exporter = tmp_path / "artifacts", _exporter(tmp_path)
    first = compile_artifact(SPEC, root, exporter)
    second = compile_artifact(SPEC, root, exporter)
    assert (first.was_reused, second.was_reused) == (False, True)
    assert first.folder == second.folder
    assert _calls(tmp_path) == 1
    assert _left(root) == [first.folder.name]
    assert first.record["size_bytes"] == sum(
        path.stat().st_size for path in first.folder.iterdir() if path.name != "harness-artifact.json"
    )
    registered_artifact(first.folder, check_hashes=True)
    ((listed, record),) = list_artifacts(root)
    assert (listed, record["spec"]["model"]) == (first.folder, "Qwen/Qwen3-4B")


@pytest.mark.parametrize("changes", [{"batch_size": 16, "decoder_batch_sizes": (1, 16)}, {"kvcache_num_blocks": 16}])
def test_another_specification_is_another_artifact(tmp_path: Path, changes: dict[str, Any]) -> None:
    exporter = _exporter(tmp_path)
    other = CompileSpec(model="Qwen/Qwen3-4B", **changes)
    assert exporter.key(SPEC) != exporter.key(other)
    compile_artifact(SPEC, tmp_path / "a", exporter)
    assert compile_artifact(other, tmp_path / "a", exporter).config.batch_size == other.batch_size
    assert len(list_artifacts(tmp_path / "a")) == 2
    for options, num_hashed in ((["--check"], 2), ([], 0)):
        listed = harness("server", "compile", "-o", str(tmp_path / "a"), *options)
        assert listed.stdout.count("; all files as registered") == num_hashed


def test_another_compiler_version_is_another_artifact_and_the_old_one_is_stale(tmp_path: Path) -> None:
    exporter = _exporter(tmp_path)
    old = compile_artifact(SPEC, tmp_path / "a", exporter)
    newer = replace(exporter, versions={**exporter.versions, "rebel-compiler": "0.12.0"})
    assert compile_artifact(SPEC, tmp_path / "a", newer).folder != old.folder
    with pytest.raises(SpecError, match=r"is stale: compiled with rebel-compiler 0\.11\.1 \(installed 0\.12\.0\)"):
        require_fresh(old.folder, newer.versions)
    assert require_fresh(old.folder, exporter.versions) is not None


def test_two_compiles_at_once_do_not_collide(tmp_path: Path) -> None:
    exporter = _exporter(tmp_path, "import os; os.sched_yield()")
    messages: list[str] = []
    made: list[bool] = []

    def compile_once() -> None:
        made.append(compile_artifact(SPEC, tmp_path / "a", exporter, on_progress=messages.append).was_reused)

    threads = [threading.Thread(target=compile_once) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, True, True]
    assert _calls(tmp_path) == 1


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            "folder.mkdir(parents=True); raise ValueError('batch_size must be a power of two')",
            "the stack refuses to compile it: ValueError: batch_size must be a power of two",
        ),
        ("spec['kvcache_num_blocks'] = 3", "the compiler changed it: kvcache_num_blocks: requested 8, compiled 3"),
    ],
)
def test_a_specification_that_the_stack_refuses_or_changes_leaves_nothing(
    tmp_path: Path, does: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        compile_artifact(SPEC, tmp_path / "a", _exporter(tmp_path, does))
    assert _left(tmp_path / "a") == []


def test_a_part_of_the_compiler_that_is_absent_is_named_with_where_it_belongs(tmp_path: Path) -> None:
    exporter = _exporter(tmp_path, "import no_such_compiler")
    with pytest.raises(
        ServerError, match=r"lacks a part of the compiler: No module named 'no_such_compiler'"
    ) as failed:
        compile_artifact(SPEC, tmp_path / "a", exporter)
    assert f"Install it for {sys.executable}" in str(failed.value.hint)


HUB = "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."
MORE = "Check your internet connection or see how to run the library in offline mode at 'https://huggingface.co/docs'."


@pytest.mark.parametrize(
    ("raised", "words", "todo"),
    [
        (
            f"OSError({HUB + chr(10) + MORE!r})",
            "the model Qwen/Qwen3-4B is not on this machine, and the model hub cannot be reached",
            "--set model=FOLDER",
        ),
        (
            "OSError('Qwen/Qwen3-4B is not a local folder and is not a valid model identifier listed on ...')",
            "the model hub does not give Qwen/Qwen3-4B to this account",
            "--set model=FOLDER",
        ),
        ("AttributeError('no attribute max_seq_len')", "the compiler failed: AttributeError: no attribute", "The log"),
        ("ValueError('first line\\nsecond line')", "the compiler failed: ValueError: first line", "The log"),
        ("AssertionError", "the compiler failed: AssertionError", "The log"),
    ],
)
def test_what_is_not_about_the_specification_does_not_blame_it(
    tmp_path: Path, raised: str, words: str, todo: str
) -> None:
    exporter = _exporter(tmp_path, f"raise {raised}")
    with pytest.raises(ServerError) as failed:
        compile_artifact(SPEC, tmp_path / "a", exporter)
    assert failed.value.what.startswith(words)
    assert todo in str(failed.value.hint)
    assert str(failed.value.where).endswith(".log")
    assert not re.search(r"\^\^|File \"|named value|[Cc]heck your internet", str(failed.value))


def test_a_compiler_whose_log_the_disk_could_not_hold_found_the_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "FULL_BYTES", 1 << 60)
    with pytest.raises(ServerError, match="the disk is full: no message") as failed:
        compile_artifact(SPEC, tmp_path / "a", _exporter(tmp_path, "sys.exit(1)"))
    assert not isinstance(failed.value, CompilerFailedError)


def test_a_folder_of_a_model_that_is_not_there_is_refused_before_the_compiler_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model \./no-model: there is no such folder"):
        compile_artifact(CompileSpec(model="./no-model"), tmp_path / "a", _exporter(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"has no config\.json.*hf download --local-dir"):
        compile_artifact(CompileSpec(model=str(tmp_path / "empty")), tmp_path / "a", _exporter(tmp_path))
    assert not (tmp_path / "calls").exists()


def test_the_sizes_of_both_models_of_the_guide_ship_by_name() -> None:
    sizes = [load_compile_spec(Path(name)).decoder_batch_sizes for name in ("qwen3-4b", "qwen3-4b-bucket6")]
    assert sizes == [(1, 2, 4, 8), (1, 2, 4, 6, 8)]


# A compile whose exporter says its pid (and that of a helper of its own) and then works for ever.
KILLED = """
import sys
from pathlib import Path
from harness.stacks.rbln.launch.compile import CompileSpec, Exporter, compile_artifact
script, root = Path(sys.argv[1]), Path(sys.argv[2])
exporter = Exporter(Path(sys.executable), script, {}, {}, free_gib=0.001)
compile_artifact(CompileSpec(model="m"), root, exporter, on_progress=print)
"""
ENDLESS = """
import os, signal, subprocess, sys
from pathlib import Path
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
Path(sys.argv[2]).mkdir()
Path({pids!r}).write_text(f"{{os.getpid()}} {{helper.pid}}\\n")
signal.pause()
"""


def test_a_killed_compile_takes_its_exporter_with_it_and_what_outlives_it_holds_the_lock(tmp_path: Path) -> None:
    script, root, pids = tmp_path / "endless.py", tmp_path / "a", tmp_path / "pids"
    script.write_text(ENDLESS.format(pids=str(pids)))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(script), str(root)], stdout=subprocess.DEVNULL) as harness:
        assert comes_true(lambda: pids.is_file() and pids.read_text().endswith("\n"))
        exporter, helper = map(int, pids.read_text().split())
        harness.kill()
    try:
        assert ends(exporter)
        (lock,) = root.glob(".*.lock")
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(helper, signal.SIGKILL)
    with lock.open() as file:
        assert comes_true(lambda: _can_be_locked(file.fileno()))


def _can_be_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_what_a_killed_compile_left_is_cleared(tmp_path: Path) -> None:
    exporter = _exporter(tmp_path)
    root = tmp_path / "a"
    left = root / f".qwen3-4b-{exporter.key(SPEC)}.partial"
    left.mkdir(parents=True)
    (left / "prefill.rbln").write_text("half")
    assert not compile_artifact(SPEC, root, exporter).was_reused
    assert not left.exists()


def test_too_little_disk_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    exporter = replace(_exporter(tmp_path), free_gib=1e9)
    with pytest.raises(ServerError, match=r"GiB free, 1e\+09 GiB needed to compile"):
        compile_artifact(SPEC, tmp_path / "a", exporter)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("damage", ["truncate", "remove", "edit", "record"])
def test_a_damaged_artifact_is_refused(tmp_path: Path, damage: str) -> None:
    folder = compile_artifact(SPEC, tmp_path / "a", _exporter(tmp_path)).folder
    graph = folder / "decoder_batch_4.rbln"
    if damage == "truncate":
        os.truncate(graph, 3)
    elif damage == "remove":
        graph.unlink()
    elif damage == "edit":
        graph.write_bytes(graph.read_bytes()[::-1])
    else:
        (folder / "harness-artifact.json").unlink()
    with pytest.raises(ServerError, match=r"differs from its registration|not registered as complete"):
        registered_artifact(folder, check_hashes=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\ndecoder_batch_sizes = [4]', "the single bucket 4 is not batch_size 8: such an artifact cannot"),
        ('model = "m"\ndecoder_batch_sizes = [1, 8, 16]', "bucket 16 is above batch_size 8"),
        ('model = "m"\ndecoder_batch_sizes = [1, 4]', "lack batch_size 8"),
        ('model = "m"\ndecoder_batch_sizes = [8, 8]', "must be distinct"),
        ('model = "m"\nmax_seq_len = 65536', "above the 32768 tokens of eager attention; give partition_tokens"),
        ('model = "m"\nmax_seq_len = 8192\npartition_tokens = 3000', "do not divide max_seq_len"),
        ('model = "m"\nkvcache_num_blocks = 1', "kvcache_num_blocks: must be greater than or equal to 2"),
        ("batch_size = 8", "model: is missing"),
        ('model = "m"\nbatchsize = 8', "batchsize: unknown key"),
    ],
)
def test_what_the_stack_would_not_catch_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "spec.toml").write_text(text)
    with pytest.raises(SpecError, match=message):
        load_compile_spec(tmp_path / "spec.toml")


def test_slots_below_the_limit_are_a_warning_that_says_what_it_means(tmp_path: Path) -> None:
    messages: list[str] = []
    compile_artifact(
        CompileSpec(model="m", kvcache_num_blocks=6), tmp_path / "a", _exporter(tmp_path), on_progress=messages.append
    )
    assert messages[0].startswith(
        "warning: 6 KV slots are below max_num_seqs (8): a slot is always reserved for padding"
    )
    assert "at most 5 requests run at once" in messages[0]
