"""Installs the real server stack into a separate environment, pinned by version and hash.

Each stage is recorded when done, so that a second run continues. uv links what two releases share from its cache, so no
file is ever changed in place. Package indexes come from the configuration of pip.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.children import text_command
from harness.errors import ServerError, SpecError
from harness.extras.twin.environment import (
    COMMON_LOCK,
    STAMP_FILE,
    TwinEnvironment,
    TwinStack,
    default_folder,
    find_twin,
    read_stamp,
    stack_named,
    twin_variables,
)
from harness.outputs import whole_file
from harness.stacks.rbln.rules.kv_rules import release_of
from harness.uv import uv_install

TORCH = "2.13.0"
PACKAGES = ("vllm", "vllm_rbln", "optimum_rbln")
PYTHONS = ("3.11", "3.12", "3.10", "3.13")
"""Versions the wheels exist for, in the order they are tried."""
DOWNLOAD_MIB = {"torch (CPU wheel)": 183, "vllm": 310, "the other 190 packages": 420}
"""torch and vllm as measured on Linux x86-64, Python 3.11; the rest is an estimate."""
DISK_MIB = 2900
FREE_MIB = 4500
"""Free space required before the download: the installation, and room for pip to unpack."""
MIB = 1024 * 1024
SERVED_MODULES = (
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.benchmark.main", "vllm.entrypoints.openai.api_server"),
    *("vllm_rbln.v1.core.optimum_scheduler", "vllm_rbln.v1.worker.optimum_worker", "optimum.rbln"),
    "vllm_rbln.model_executor.model_loader.rbln_model_loader",
)
"""Modules that a server imports. Only these are compiled ahead: a quarter of the installed files."""
NO_NETWORK_SIGNS = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError", "Max retries")
CPU_WHEEL_HINT = "Give a CPU build of torch: --torch-wheel FILE, or --torch-index ADDRESS of PyTorch's CPU wheels"

OnProgress = Callable[[str], None]


class TwinInstallError(ServerError):
    """The twin cannot be installed on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class TorchSource:
    """Where torch comes from when the indexes that pip is configured for have no CPU build: a wheel or an index."""

    wheel: str | None = None
    index: str | None = None

    def pip_arguments(self) -> list[str]:
        if self.wheel:
            return [self.wheel]
        return [f"torch=={TORCH}", *(["--index-url", self.index] if self.index else [])]


def install_twin(
    folder: Path | None = None,
    *,
    version: str = "",
    python: str | None = None,
    torch: TorchSource | None = None,
    on_progress: OnProgress = print,
) -> TwinEnvironment:
    """The twin of one vllm-rbln version in ``folder`` (default: .venv-twin-VERSION), installed or completed as needed.

    version: default: the newest stable release. python: an interpreter; default: the first available that a CPU build
    of torch exists for. Raises TwinInstallError naming the missing requirement; completed stages are kept.
    """
    stack = stack_named(version)
    where = (default_folder(stack.version) if folder is None else folder).absolute()
    stamp = read_stamp(where)
    if stamp.get("complete") and stamp.get("locks_sha256") == stack.locks_sha256:
        on_progress(f"{where}: already installed")
        return TwinEnvironment(where, stamp)
    if where.exists() and not stamp and any(where.iterdir()):
        raise SpecError("is not a twin environment", where=str(where), hint="Choose an empty folder with --path")
    if stamp.get("stack", stack.version) != stack.version:
        raise SpecError(f"holds {stamp['stack']}", where=str(where), hint="Choose another folder with --path")
    total = sum(DOWNLOAD_MIB.values())
    parts = ", ".join(f"{name} {size} MiB" for name, size in DOWNLOAD_MIB.items())
    on_progress(f"the twin: the real vLLM {stack.vllm} and vllm-rbln {stack.version} on a stand-in device, in {where}")
    on_progress(f"to download at most about {total} MiB ({parts}); about {DISK_MIB:,} MiB on disk")
    check_disk(where, FREE_MIB // 2 if "torch" in stamp else FREE_MIB)
    torch_options = (torch or TorchSource()).pip_arguments()
    if stamp.get("locks_sha256") != stack.locks_sha256:
        kept = {key: stamp[key] for key in ("python", "torch") if key in stamp}
        stamp = kept | {"stack": stack.version, "locks_sha256": stack.locks_sha256}
    if "torch" not in stamp:
        chosen, torch_wheel = choose_python(python, torch_options, on_progress)
        on_progress(f"environment: {where} with {chosen}")
        _run([chosen, "-I", "-m", "venv", "--clear", str(where)], "cannot make the environment")
        _record(where, stamp, python=chosen)
        on_progress(f"torch {TORCH}")
        _install(where, ["--no-deps", torch_wheel], ["--no-deps", *torch_options], on_progress)
        _record(where, stamp, torch=_version(where, "torch"))
    if "packages" not in stamp:
        on_progress(f"packages of {COMMON_LOCK.name} and {stack.lock.name}")
        wanted = ["--no-deps", "--require-hashes", "-r", str(COMMON_LOCK), "-r", str(stack.lock)]
        _install(where, wanted, wanted, on_progress)
        _declare_stand_in(TwinEnvironment(where, stamp), stack)
        _record(where, stamp, packages=True)
    on_progress("checking that the installed files are the released ones, and that they load")
    twin = TwinEnvironment(where, stamp)
    num_files = check_released_files(twin)
    # Byte code is written here, or every server start would compile the modules again.
    variables = twin_variables(twin) | {"PYTHONDONTWRITEBYTECODE": ""}
    command = text_command(twin.python, f"import {', '.join(SERVED_MODULES)}")
    _run(command, "the installed packages do not load", env=variables)
    versions = {name: _version(where, name) for name in ("vllm", "vllm-rbln", "optimum-rbln", "torch", "transformers")}
    size_mib = sum(path.lstat().st_size for path in where.rglob("*") if not path.is_dir()) // MIB
    _record(where, stamp, complete=True, versions=versions, verified_files=num_files, size_mib=size_mib)
    on_progress(f"installed: {stamp['size_mib']:,} MiB, {num_files:,} files verified")
    return find_twin(where)


def _install(where: Path, by_uv: Sequence[str], by_pip: Sequence[str], on_progress: OnProgress) -> None:
    """Install with uv, which links the files of its cache, or with pip where uv fails."""
    python = str(where / "bin" / "python")
    try:
        uv_install(python, by_uv)
    except (OSError, subprocess.CalledProcessError) as error:
        on_progress(f"pip installs them, uv could not ({getattr(error, 'output', '') or error})")
        pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
        _run([*pip, *by_pip], "pip failed", timeout_s=3600)


def _declare_stand_in(twin: TwinEnvironment, stack: TwinStack) -> None:
    """Metadata of the stand-in runtime: the stack compares its version with that of vllm-rbln."""
    release = ".".join(map(str, release_of(stack.version)))
    folder = twin.site_packages / f"rebel_compiler-{release}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: rebel-compiler\nVersion: {release}\nSummary: Stand-in: no compiler inside\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def choose_python(wanted: str | None, torch_options: Sequence[str], on_progress: OnProgress = print) -> tuple[str, str]:
    """An interpreter of a supported version for which pip can find a CPU build of torch, and the URL of that build."""
    refused: list[str] = []
    lacks_torch = False
    for candidate in [wanted] if wanted else candidate_pythons():
        reason, torch_wheel = _why_not_python(candidate), ""
        if not reason:
            reason, torch_wheel = _torch_for(candidate, torch_options)
            lacks_torch = lacks_torch or bool(reason)
        if not reason:
            return candidate, torch_wheel
        on_progress(f"not {candidate}: {reason}")
        refused.append(f"{candidate}: {reason}")
    raise TwinInstallError(
        "; ".join(refused) or "none available",
        where="no Python for the twin",
        # Where only torch is missing, another Python would most likely lack it too.
        hint=CPU_WHEEL_HINT if lacks_torch else f"Install one of Python {', '.join(PYTHONS)} with venv",
    )


def candidate_pythons() -> Iterator[str]:
    """Available interpreters, each supported version once: this process's, then PATH, then pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv")
    with suppress(RuntimeError):  # a user without a home folder
        pyenv = pyenv.expanduser()
    for version in PYTHONS:
        if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
            yield getattr(sys, "_base_executable", sys.executable)
            continue
        on_path = shutil.which(f"python{version}")
        # pyenv puts shims on PATH even for versions that are not active.
        if on_path and "shims" not in on_path:
            yield on_path
            continue
        installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
        if installed:
            yield str(installed[-1])


def check_released_files(twin: TwinEnvironment) -> int:
    """Compare every file of the stack's wheels with the hash in its RECORD; returns the number of files.

    Raises ServerError naming the first file that differs.
    """
    hint = "Delete the folder and run harness server twin install again"
    count = 0
    for described in (path for name in PACKAGES for path in twin.site_packages.glob(f"{name}-*.dist-info")):
        for name, recorded, *_ in csv.reader((described / "RECORD").read_text(encoding="utf-8").splitlines()):
            if not recorded.startswith("sha256="):
                continue
            count += 1
            path = Path(os.path.normpath(described.parent / name))
            with ServerError.on_os_error("cannot be read", where=path, hint=hint):
                digest = hashlib.sha256(path.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded[7:]:
                raise ServerError(f"{path.name} is not the released file", where=str(path.parent), hint=hint)
    return count


def _why_not_python(python: str) -> str:
    try:
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        version = _run([python, "-I", "-c", code], "").strip()
    except TwinInstallError:
        return "does not run, or has no venv"
    return "" if version in PYTHONS else f"Python {version or '?'} is not one of {', '.join(PYTHONS)}"


def _torch_for(python: str, torch_options: Sequence[str]) -> tuple[str, str]:
    """Why pip finds no CPU build of torch ("" where it finds one), and the URL of the build."""
    command = [python, "-I", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    try:
        report = _run([*command, "--report", "-", *torch_options], "pip finds none")
    except TwinInstallError as error:
        if any(sign in str(error) for sign in NO_NETWORK_SIGNS):
            raise TwinInstallError(
                "pip cannot reach its index",
                where=python,
                hint="Check the network or pip's configuration, run it again",
            ) from error
        return f"pip finds no torch {TORCH} for it", ""
    found = json.loads(report[report.index("{") :])["install"][0]
    version = found["metadata"]["version"]
    if sys.platform == "linux" and "+cpu" not in version and os.uname().machine == "x86_64":
        return f"the torch {version} that pip finds is a GPU build", ""
    return "", found["download_info"]["url"]


def check_disk(where: Path, needed_mib: int) -> None:
    """Raise TwinInstallError when less than ``needed_mib`` is free where ``where`` is, or would be made."""
    existing = next(folder for folder in (where, *where.parents) if folder.exists())
    free_mib = shutil.disk_usage(existing).free // MIB
    if free_mib < needed_mib:
        raise TwinInstallError(
            f"{free_mib:,} MiB free on this disk, the twin needs {needed_mib:,}",
            where=str(existing),
            hint=f"Free {needed_mib - free_mib:,} MiB, or choose a folder on another disk with --path",
        )


def _run(command: Sequence[str], what: str, *, env: dict[str, str] | None = None, timeout_s: float = 900) -> str:
    """Output of a command; TwinInstallError with its last lines when it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **(env or {})}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TwinInstallError(f"{what}: {error}", where=command[0]) from error
    if done.returncode:
        messages = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        unreachable = [line for line in messages if any(sign in line for sign in NO_NETWORK_SIGNS)]
        raise TwinInstallError(
            f"{what}: {' / '.join([*unreachable[:1], *messages[-3:]])}",
            where=command[0],
            hint="Fix the cause and run it again",
        )
    return done.stdout


def _version(where: Path, name: str) -> str:
    packages = metadata.distributions(name=name, path=[str(TwinEnvironment(where, {}).site_packages)])
    package = next(iter(packages), None)
    if package is None:
        raise TwinInstallError(f"{name} is not installed", where=str(where), hint="Fix the cause and run it again")
    return package.version


def _record(where: Path, stamp: dict[str, Any], **done: Any) -> None:
    """Write the stamp atomically: a partial stamp would look like a folder of something else."""
    stamp.update(done)
    with whole_file(where / STAMP_FILE) as file:
        file.write(f"{json.dumps(stamp, indent=2)}\n".encode())
