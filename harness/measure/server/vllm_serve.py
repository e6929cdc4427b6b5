"""What every launch of ``vllm serve`` shares, whatever the device: command, environment, folder of the sockets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.children import script_command
from harness.errors import ServerError
from harness.model.spec import ServerSpec
from harness.redact import filled_env

SOCKET_FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Names the folder of the sockets of vLLM's processes. vLLM leaves them there; default: the temporary folder."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}
FIND_TIMEOUT_S = 60.0
_FIND = """
import importlib.metadata, json
found = {}
for name in %r:
    try:
        package = importlib.metadata.distribution(name)
        # None of a folder whose file of metadata is gone: what is there then is no installed package.
        if package.version is not None:
            found[name] = (package.version, str(package.locate_file("")))
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """An installed serving stack. vllm: the command. versions: of its packages, those that are installed.

    site_packages: of the package that was looked for.
    """

    vllm: Path
    versions: Mapping[str, str]
    site_packages: Path


def find_stack(environment: str, packages: Sequence[str], hint: str, package: str = "vllm") -> Stack:
    """The stack whose ``vllm`` is in a virtual environment, or on PATH; ServerError says what is missing.

    hint: how to get it. package: whose site-packages are looked for.
    """
    command = str(Path(environment).absolute() / "bin" / "vllm") if environment else shutil.which("vllm")
    if not command or not Path(command).is_file():
        raise ServerError(
            f"no vllm command in {environment}" if environment else "no vllm command on PATH",
            where="server.environment",
            hint=hint,
        )
    python = Path(command).with_name("python")
    try:
        script = _FIND % (tuple(packages),)
        done = subprocess.run(
            script_command(python), input=script, capture_output=True, text=True, timeout=FIND_TIMEOUT_S, check=True
        )
        found: dict[str, tuple[str, str]] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ServerError(
            f"its Python does not run ({type(error).__name__})", where=str(python), hint="Check the environment"
        ) from error
    versions = {name: version for name, (version, _) in found.items()}
    return Stack(Path(command), versions, Path(found[package][1] if package in found else ""))


def flag_words(flag: str, value: object) -> tuple[str, ...]:
    """A flag of ``vllm serve`` with its value: --x or --no-x of a switch; nothing where the value is left to vLLM."""
    if isinstance(value, bool):
        return (flag if value else flag.replace("--", "--no-", 1),)
    if isinstance(value, tuple):
        return (flag, *map(str, value)) if value else ()
    return () if value is None else (flag, str(value))


@dataclass(frozen=True, slots=True)
class VllmPlugin:
    """A vLLM plugin of the harness. file_variable: names the file of its records, and so switches it on."""

    name: str
    file_variable: str

    def variables(self, file: Path, allowed: str | None = None) -> dict[str, str]:
        """Variables that switch it on. allowed: the server's VLLM_PLUGINS, which must name it too."""
        variables = {self.file_variable: str(file)}
        if allowed is not None and self.name not in allowed.split(","):
            variables[PLUGINS_VARIABLE] = f"{allowed},{self.name}"
        return variables


def requested_plugins(server: ServerSpec, host: Mapping[str, str]) -> str | None:
    """VLLM_PLUGINS as the experiment sets it, or the environment ``host``; None: vLLM loads every plugin."""
    return server.env.get(PLUGINS_VARIABLE, host.get(PLUGINS_VARIABLE))


def serve_environment(
    server: ServerSpec, variables: Mapping[str, str], search: Sequence[str], plugin: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a served vLLM. Those of the experiment override ``variables``.

    search: folders placed before the experiment's PYTHONPATH. plugin: what switches a plugin of the harness on.
    """
    given = filled_env(server.env, os.environ)
    path = [*search, *filter(None, given.pop("PYTHONPATH", "").split(os.pathsep))]
    return {**QUIET, **variables, **given, **plugin, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


def scratch_variable(env: Mapping[str, str]) -> str:
    """The variable that names a folder for the server's sockets; "" where somebody chose one."""
    return "" if SOCKET_FOLDER_VARIABLE in {**os.environ, **env} else SOCKET_FOLDER_VARIABLE
