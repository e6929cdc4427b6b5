"""Artifacts compiled to a specification in the stack's environment: timed, hashed, registered and reused.

A registered artifact is complete: it is written elsewhere, then moved into place and never changed. Its name covers the
specification and the versions of the compiler, so a stale artifact is never reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import Field, model_validator

from harness.clock import NS_PER_S, MonotonicClock, utc_now
from harness.errors import HarnessError, ServerError, SpecError
from harness.measure.records.disk import file_entry
from harness.measure.server.supervisor import PR_SET_PDEATHSIG
from harness.model.spec import Spec, load_toml
from harness.shipped import find_shipped
from harness.stacks.rbln.launch.artifacts import EAGER_LIMIT_TOKENS, ArtifactConfig, read_artifact

RECORD_FILE = "harness-artifact.json"
EXPORT = Path(__file__).resolve().parent / "inside" / "export_artifact.py"
COMPILING_PACKAGES = ("optimum-rbln", "rebel-compiler", "torch", "transformers")
"""Packages whose versions change the artifact."""
GIB = 1 << 30
DEFAULT_FREE_GIB = 40.0
"""Weights from the hub, their copies while graphs compile, and the artifact (a 4B model in bf16)."""
LAST_LINES, LAST_BYTES = 5, 1 << 16
EXCEPTION = re.compile(r"^(?P<line>(?:\w+\.)*(?P<kind>\w*(?:Error|Exception))(?:: .*)?)$", re.MULTILINE)
"""The line after a traceback. Lines of the traceback itself are indented."""
REFUSALS = ("ValueError", "NotImplementedError", "RuntimeError", "ValidationError")
HUB_FAILURES = (
    (
        re.compile(r"couldn't connect to|specific connection error|LocalEntryNotFound|OfflineMode|ConnectionError"),
        "the model {model} is not on this machine, and the model hub cannot be reached",
        "Give this machine access to the hub (HF_HUB_OFFLINE unset), copy the model into its cache",
    ),
    (
        re.compile(r"not a valid model identifier|gated repo|not a valid git identifier"),
        "the model hub does not give {model} to this account",
        "Check its name and revision, log in (`hf auth login`)",
    ),
)
"""Why transformers did not get a model: what it says (utils/hub.py of 4.57 and 5), and what that means."""


class CompileSpec(Spec):
    """What to compile. kvcache_num_blocks: KV slots, default batch_size; partition_tokens: for flash attention."""

    model: str = Field(description="a model id of the hub, or a folder")
    revision: str = Field(default="", description="commit of the model on the hub")
    batch_size: int = Field(default=8, ge=1, le=1024)
    decoder_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    max_seq_len: int = Field(default=8192, ge=256, multiple_of=128)
    num_devices: int = Field(default=4, ge=1, le=64)
    kvcache_num_blocks: int | None = Field(default=None, ge=2)
    partition_tokens: int | None = Field(default=None, ge=1024)
    npu: str = "RBLN-CA25"
    dtype: str = "bfloat16"

    @model_validator(mode="after")
    def _servable(self) -> CompileSpec:
        """Values that the stack accepts and fails on later, or silently changes."""
        buckets = self.decoder_batch_sizes
        if not buckets or min(buckets) < 1 or len(set(buckets)) != len(buckets):
            raise ValueError(f"decoder_batch_sizes {list(buckets)} must be distinct and positive")
        if max(buckets) > self.batch_size:
            raise ValueError(
                f"bucket {max(buckets)} is above batch_size {self.batch_size}; drop it or raise batch_size"
            )
        if buckets == (buckets[0],) and buckets[0] != self.batch_size:
            raise ValueError(
                f"the single bucket {buckets[0]} is not batch_size {self.batch_size}: such an artifact cannot be loaded"
            )
        if self.batch_size not in buckets:
            raise ValueError(f"decoder_batch_sizes {list(buckets)} lack batch_size {self.batch_size}: add it")
        if self.partition_tokens is None and self.max_seq_len > EAGER_LIMIT_TOKENS:
            raise ValueError(
                f"max_seq_len {self.max_seq_len} is above the {EAGER_LIMIT_TOKENS} tokens of eager attention; "
                "give partition_tokens"
            )
        partition = self.partition_tokens
        if partition is not None and (self.max_seq_len % partition or self.max_seq_len < 2 * partition):
            raise ValueError(
                f"partition_tokens {partition} do not divide max_seq_len {self.max_seq_len} in two or more parts"
            )
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """Valid settings whose effect may surprise."""
        slots = self.kvcache_num_blocks
        if slots is not None and self.partition_tokens is None and slots < self.batch_size:
            return (
                f"{slots} KV slots are below max_num_seqs ({self.batch_size}): a slot is always reserved for padding, "
                f"so at most {slots - 1} requests run at once and the others wait",
            )
        return ()

    def exported(self) -> dict[str, Any]:
        """The specification as the export script reads it."""
        return {
            "model": self.model,
            "revision": self.revision,
            "batch_size": self.batch_size,
            "max_seq_len": self.max_seq_len,
            "decoder_batch_sizes": sorted(self.decoder_batch_sizes),
            "kvcache_num_blocks": self.kvcache_num_blocks or (None if self.partition_tokens else self.batch_size),
            "kvcache_partition_len": self.partition_tokens,
            "num_devices": self.num_devices,
            "npu": self.npu,
            "dtype": self.dtype,
        }


FULL_BYTES = 1 << 20
"""A disk with less free space after a compile failed was full."""


class CompilerFailedError(ServerError):
    """The compiler ended with an error that is not about the specification."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """The command that writes an artifact, ``python script SPEC_JSON FOLDER``, and its versions and environment."""

    python: Path
    script: Path
    versions: Mapping[str, str]
    env: Mapping[str, str]
    free_gib: float = DEFAULT_FREE_GIB

    def key(self, spec: CompileSpec) -> str:
        """Name of the artifact: digest of specification, compiler versions and export script."""
        used = {name: self.versions.get(name, "") for name in COMPILING_PACKAGES}
        canonical = json.dumps([spec.exported(), used], sort_keys=True).encode()
        return hashlib.sha256(canonical + self.script.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A registered artifact. record: what RECORD_FILE says. was_reused: it was there already."""

    folder: Path
    config: ArtifactConfig
    record: Mapping[str, Any]
    was_reused: bool


def load_compile_spec(path: Path, changed: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> CompileSpec:
    """The specification in a file, or in the shipped one of that name; SpecError names every key that is wrong.

    changed: of the table in the file, the one that is meant.
    """
    found = find_shipped("artifacts", str(path), what="artifact")
    return CompileSpec.from_table(changed(load_toml(found)), where=str(found))


def compile_artifact(
    spec: CompileSpec, root: Path, exporter: Exporter, *, on_progress: Callable[[str], None] = lambda _: None
) -> Artifact:
    """The artifact of ``spec`` below ``root``: the registered artifact if it exists, else compiled now.

    Of two compiles of the same specification the second waits and reuses the result of the first. What the compiler
    says is in a file beside the folder. Raises SpecError when the stack refuses the specification, CompilerFailedError
    for another error of the compiler, ServerError for what the machine lacks, a compiler that was killed, or a damaged
    registry.
    """
    if spec.model.startswith(("/", ".", "~")) and not Path(spec.model).is_dir():
        raise SpecError("there is no such folder", where=f"model {spec.model}", hint="Name the folder of the model")
    if Path(spec.model).is_dir() and not (Path(spec.model) / "config.json").is_file():
        hint = "Name the folder of a model, as hf download --local-dir FOLDER fills it"
        raise SpecError("has no config.json", where=f"model {spec.model}", hint=hint)
    for warning in spec.warnings:
        on_progress(f"warning: {warning}")
    name = re.sub(r"[^a-z0-9.-]+", "-", Path(spec.model).name.lower()).strip("-") or "model"
    folder = root.absolute() / f"{name}-{exporter.key(spec)}"
    with ServerError.on_os_error("cannot be written", where=folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), on_progress) as lock:
            if folder.exists():
                return registered_artifact(folder)
            return _compile(spec, folder, exporter, on_progress, lock)


def registered_artifact(folder: Path, *, check_hashes: bool = False) -> Artifact:
    """The artifact in ``folder`` with its record; ServerError when a file differs from its registration."""
    record = read_record(folder)
    if record is None:
        raise ServerError(
            "is not registered as complete", where=str(folder), hint="Delete the folder and compile again"
        )
    for name, facts in cast("dict[str, dict[str, Any]]", record["files"]).items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["size_bytes"] or (check_hashes and file_entry(path).sha256 != facts["sha256"]):
            raise ServerError(
                f"{name} differs from its registration ({'missing' if size is None else f'{size} bytes'})",
                where=str(folder),
                hint="Delete the folder and compile again",
            )
    return Artifact(folder, read_artifact(folder), record, was_reused=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """The registry's record of the artifact in ``folder``; None when ``harness server compile`` did not make it."""
    try:
        return cast("dict[str, Any]", json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def require_fresh(folder: Path, versions: Mapping[str, str]) -> dict[str, Any] | None:
    """The artifact's record; SpecError when it was compiled by other versions than those installed.

    None for an artifact that was compiled elsewhere: its compiler is unknown.
    """
    record = read_record(folder)
    if record is None:
        return None
    made_by = cast("dict[str, str]", record.get("versions", {}))
    # The runtime must match the compiler; torch and transformers matter only while compiling.
    stale = [
        f"{name} {made_by[name]} (installed {versions[name]})"
        for name in COMPILING_PACKAGES[:2]
        if name in made_by and name in versions and made_by[name] != versions[name]
    ]
    if stale:
        raise SpecError(
            f"is stale: compiled with {', '.join(stale)}",
            where=str(folder),
            hint="Compile it again: harness server compile",
        )
    return record


def list_artifacts(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every registered artifact below ``root`` with its record, by name."""
    folders = [(path.parent, read_record(path.parent)) for path in sorted(root.glob(f"[!.]*/{RECORD_FILE}"))]
    return [(folder, record) for folder, record in folders if record is not None]


def _compile(
    spec: CompileSpec, folder: Path, exporter: Exporter, on_progress: Callable[[str], None], lock: int
) -> Artifact:
    free_gib = shutil.disk_usage(folder.parent).free / GIB
    if free_gib < exporter.free_gib:
        raise ServerError(
            f"{free_gib:.1f} GiB free, {exporter.free_gib:g} GiB needed to compile",
            where=str(folder.parent),
            hint="Free some space, or choose another folder",
        )
    partial = folder.with_name(f".{folder.name}.partial")
    # With the lock held, an existing folder was left by a compile that was killed.
    shutil.rmtree(partial, ignore_errors=True)
    log = folder.with_name(f"{folder.name}.log")
    clock = MonotonicClock()
    began_ns = clock.now_ns()
    sizes = sorted(spec.decoder_batch_sizes)
    on_progress(f"compiling {spec.model} for {spec.num_devices} x {spec.npu}, buckets {sizes}; log: {log}")
    try:
        _export(spec, partial, exporter, lock, log)
        seconds = (clock.now_ns() - began_ns) / NS_PER_S
        config = read_artifact(partial)
        _require_as_specified(spec, config, log)
        files = {
            path.relative_to(partial).as_posix(): file_entry(path).model_dump()
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        record = {
            "spec": spec.model_dump(mode="json"),
            "versions": {name: exporter.versions[name] for name in COMPILING_PACKAGES if name in exporter.versions},
            "compiled_at_utc": utc_now().isoformat(timespec="seconds"),
            # Never 0, which means that nobody timed it.
            "seconds": max(round(seconds, 1), 0.1),
            "size_bytes": sum(int(facts["size_bytes"]) for facts in files.values()),
            "files": files,
        }
        (partial / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Artifact(folder, config, record, was_reused=False)


def _export(spec: CompileSpec, folder: Path, exporter: Exporter, lock: int, log: Path) -> None:
    """Run the exporter. It ends with this process, and its children hold the lock until they end."""
    words: Sequence[str] = (str(exporter.python), str(exporter.script), json.dumps(spec.exported()), str(folder))
    libc = ctypes.CDLL(None)
    with log.open("wb") as output:
        done = subprocess.run(
            words,
            # Unbuffered, so that the last line of the log is the last that was said.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **exporter.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            pass_fds=(lock,),
            # A compile takes long; it must not go on unnoticed when the harness was killed.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
    if done.returncode:
        raise _failed(spec, done.returncode, log, exporter.python)


def _failed(spec: CompileSpec, returncode: int, log: Path, python: Path) -> HarnessError:
    """Why a compile failed, by the last words of the compiler."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    said = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))] or ["no message"]
    raised = list(EXCEPTION.finditer(text))
    last = raised[-1]["line"] if raised else said[-1]
    whole, kind = (text[raised[-1].start() :], raised[-1]["kind"]) if raised else (last, "")
    if returncode < 0:
        what = f"the compiler was ended by signal {-returncode} ({signal.strsignal(-returncode)}): {said[-1]}"
        return ServerError(what, where=str(log), hint="Compile again, with more memory where that was short")
    # On a full disk the log lacks the words that say so.
    is_full = shutil.disk_usage(log.parent).free < FULL_BYTES
    if is_full or any(os.strerror(errno.ENOSPC) in line for line in said[-LAST_LINES:]):
        return ServerError(f"the disk is full: {last}", where=str(log), hint="Free some space and compile again")
    if any(os.strerror(code) in last for code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)):
        return ServerError(f"a file cannot be used: {last}", where=str(log), hint="Allow it and compile again")
    if kind in ("ModuleNotFoundError", "ImportError"):
        what = f"the environment lacks a part of the compiler: {last.partition(': ')[2]}"
        hint = f"Install it for {python} (docs/guides/npu.md), and compile again"
        return ServerError(what, where=str(log), hint=hint)
    return _of_hub(spec, whole, log) or _of_compiler(spec, kind, last, whole, log)


def _of_hub(spec: CompileSpec, whole: str, log: Path) -> HarnessError | None:
    """The error of a model that the hub did not give. whole: the last exception, with all its lines."""
    for words, what, hint in HUB_FAILURES:
        if words.search(whole):
            hint = f"{hint}, or name a folder of this machine that has the model: --set model=FOLDER"
            return ServerError(what.format(model=spec.model), where=str(log), hint=hint)
    return None


def _of_compiler(spec: CompileSpec, kind: str, last: str, whole: str, log: Path) -> HarnessError:
    """An exception that names a key is about its value; any other is the compiler's own."""
    if kind in REFUSALS and any("_" in key and key in whole for key in spec.exported()):
        return SpecError(f"the stack refuses to compile it: {last}", where=str(log), hint="Change the named value")
    hint = "The log has what it did before. Where it ends alike again, ask the vendor"
    return CompilerFailedError(f"the compiler failed: {last}", where=str(log), hint=hint)


def _require_as_specified(spec: CompileSpec, config: ArtifactConfig, log: Path) -> None:
    """Refuse an artifact whose parameters the compiler has changed."""
    requested = spec.exported()
    compiled = {
        "batch_size": config.batch_size,
        "max_seq_len": config.max_seq_len,
        "decoder_batch_sizes": list(config.decoder_batch_sizes),
        "num_devices": config.num_devices,
        "kvcache_num_blocks": config.kvcache_num_blocks,
    }
    different = [
        f"{key}: requested {requested[key]}, compiled {value}"
        for key, value in compiled.items()
        if requested[key] not in (value, None)
    ]
    if different:
        raise SpecError(
            f"the compiler changed it: {'; '.join(different)}", where=str(log), hint="Request the compiled values"
        )


@contextlib.contextmanager
def _lock(path: Path, on_progress: Callable[[str], None]) -> Generator[int, None, None]:
    """Hold the lock of an artifact; the kernel frees it when all holders of the descriptor end, for any reason."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("another process is compiling it; waiting")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
