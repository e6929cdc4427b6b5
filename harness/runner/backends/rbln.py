"""The NPUs of this host, or of another one over ssh, as a backend: ``vllm serve`` of a compiled artifact.

Refuses busy devices, and an artifact or a package that is not as declared.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import ServerError, SpecError, check_all
from harness.kinds import KINDS
from harness.measure.server.doctor import Check, first_line_of
from harness.measure.server.life import LOOPBACK, LaunchPlan
from harness.measure.server.process import require_port
from harness.model.spec import ServerSpec
from harness.plugins import BackendKind, service
from harness.redact import filled_env
from harness.runner.backends.base import (
    SLOW_START,
    STACK_KEYS,
    FirstExperiment,
    ServerBackend,
    check_compiled_server,
    npus_of,
    rules_in_force,
)
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.launch.artifacts import CONFIG_FILE, check_artifact, named_artifact, read_artifact
from harness.stacks.rbln.launch.compile import COMPILING_PACKAGES, EXPORT, Exporter, require_fresh
from harness.stacks.rbln.launch.devices import find_command, read_devices, require_idle
from harness.stacks.rbln.launch.releases import usable_with
from harness.stacks.rbln.launch.requirements import GLIBC, OLDER_GLIBC
from harness.stacks.rbln.launch.serving import (
    OtherHost,
    ServedArtifact,
    ServeSetup,
    check_installed,
    find_rbln_stack,
    serve_plan,
)
from harness.stacks.rbln.rules.dialect import dialect_of
from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE, rule_set, rules_for_version

VLLM_RBLN = rule_set(NEWEST_STABLE).releases[-1]
STACK = ("vllm", "vllm-rbln", "optimum-rbln")
COMPILER = "rebel-compiler"
COMPILE = "harness server compile"
# Where `harness server compile` puts models by default.
ARTIFACTS = Path("artifacts")


@dataclass(frozen=True, slots=True)
class RblnBackend(ServerBackend):
    """vllm-rbln on RBLN NPUs. The artifact is compiled before: ``harness server compile``."""

    kind: BackendKind = KINDS["rbln"]
    shown_keys: ClassVar[frozenset[str]] = STACK_KEYS

    def check_server(self, server: ServerSpec) -> None:
        check_compiled_server(server)

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        # Another host's stack is known once its server starts.
        return {} if server.ssh else rules_in_force(find_rbln_stack(server.environment).site_packages)

    def check_host(self, server: ServerSpec) -> None:
        if server.ssh:
            named_artifact(server)
            _other_host().check(server)
            return
        check_all(
            lambda: named_artifact(server),
            lambda: _check_stack(server),
            lambda: _check_devices(server),
            lambda: require_port(LOOPBACK, server.port),
            lambda: filled_env(server.env, os.environ),
            where="this host",
        )

    def checked_on(self, server: ServerSpec) -> str:
        if server.ssh:
            return f"on {server.ssh}: the stack, the compiled models, and devices that its driver reports"
        return (
            f"on this host: the compiled models (not hashed: {COMPILE} -o {Path(server.artifact).parent} --check does) "
            "and what compiled them, the stack, whether its patch fits, the driver, the devices (there, normal, idle), "
            "the port"
        )

    def exporter(self, server: ServerSpec) -> Exporter:
        if server.ssh:
            what = "is on another host, where nothing is compiled from here"
            raise SpecError(what, where="server.ssh", hint="Compile there: harness server compile")
        stack = find_rbln_stack(server.environment)
        if lacking := [name for name in COMPILING_PACKAGES if name not in stack.versions]:
            raise ServerError(
                f"the environment lacks {', '.join(lacking)}, which compile a model",
                where=str(stack.vllm.parent.parent),
                hint="Install them there, with the install command of docs/guides/npu.md, section 2",
            )
        return Exporter(stack.vllm.with_name("python"), EXPORT, stack.versions, {})

    @property
    def first_experiment(self) -> FirstExperiment:
        """With the first compiled model below ``artifacts``, where there is any."""
        about = "vllm-rbln on the NPUs of this host"
        stack = ('environment = ""', "virtual environment of vllm-rbln; empty: the vllm on PATH")
        folder = next((path.parent for path in sorted(ARTIFACTS.glob(f"*/{CONFIG_FILE}"))), None)
        if folder is None:
            artifact = ('artifact = ""', f"name the folder of the compiled model here: {COMPILE}")
            server = (artifact, stack, *SLOW_START)
            return FirstExperiment(about, server=server, needs=f"{COMPILE} qwen3-4b{_of_stack()}")
        config = read_artifact(folder)
        shape = (
            (f'artifact = "{folder}"', "compiled so:"),
            (f"max_num_seqs = {config.batch_size}", ""),
            (f"decode_buckets = {list(config.decoder_batch_sizes)}", ""),
            (f"slot_tokens = {config.max_seq_len}", ""),
            (f"kv_slots = {config.kvcache_num_blocks}", ""),
        )
        return FirstExperiment(about, server=(*shape, stack, *SLOW_START), room_tokens=config.max_seq_len)

    def readiness(self) -> Check:
        return self.readiness_of("")

    def readiness_of(self, environment: str) -> Check:
        """Whether the vendor's packages, device tool and device files are present."""
        devices = sorted(path.name for path in Path("/dev").glob("rbln*"))
        tool = first_line_of("rbln-smi", "--version")
        installed: Mapping[str, str] = {}
        try:
            stack = find_rbln_stack(environment)
            installed = stack.versions
            present = ", ".join(f"{name} {installed.get(name) or 'absent'}" for name in (*STACK, COMPILER))
            facts = [present, *_pin_broken(installed), usable_with(stack.site_packages)]
        except ServerError as error:
            facts = [error.what]
        facts += [
            "rbln-smi present" if tool is not None else "rbln-smi absent",
            f"{len(devices)} devices" if devices else "no /dev/rbln*",
            *_device_groups(has_tool=tool is not None),
            libc_in_words(*platform.libc_ver(), has_vllm="vllm" in installed),
        ]
        parts = {
            f"vllm-rbln {VLLM_RBLN}": "vllm-rbln" in installed,
            COMPILER: COMPILER in installed,
            "rbln-smi": tool is not None,
            "/dev/rbln*": bool(devices),
        }
        missing = [name for name, is_there in parts.items() if not is_there]
        can_compile = parts[COMPILER] and bool(installed)
        compiling = f"compiling needs no device: {COMPILE} qwen3-4b -o FOLDER{_asked(environment)}"
        return Check(
            name="backend rbln",
            ok=None if missing else True,
            found="; ".join(facts),
            need=", ".join(missing or parts),
            how="; ".join(_how_to_get(missing or list(parts), environment)),
            meanwhile=compiling if missing and can_compile else "",
        )

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        artifact = named_artifact(server).absolute()
        if server.ssh:
            port = require_port(LOOPBACK, options.port)
            return _other_host().plan(server, backend=self.kind.name, port=port, run_folder=options.run_folder)
        config = read_artifact(artifact)
        check_artifact(config, server, str(artifact))
        stack = find_rbln_stack(server.environment)
        record = require_fresh(artifact, stack.versions)
        devices = npus_of(server, config.num_devices, options.device)
        report = require_idle(devices)
        return serve_plan(
            server,
            ServedArtifact(artifact, config, artifact.name),
            stack,
            ServeSetup(
                self.kind.name,
                require_port(LOOPBACK, options.port),
                options.run_folder,
                options.log_format,
                npus=devices,
                device_command=find_command(),
                devices=report,
                requested={"compiled": None if record is None else {key: record[key] for key in ("spec", "versions")}},
            ),
        )


def _pin_broken(versions: Mapping[str, str]) -> list[str]:
    """What vllm-rbln and the vLLM beside it say against each other."""
    rules, vllm = rules_for_version(versions.get("vllm-rbln", "")), versions.get("vllm", "").partition("+")[0]
    wanted = "" if rules is None else dialect_of(rules).vllm
    if not wanted or not vllm or vllm == wanted:
        return []
    return [f"vLLM {vllm} beside it, where vLLM {wanted} is pinned"]


def _how_to_get(missing: Sequence[str], environment: str) -> Iterator[str]:
    """What to do for each part that is missing, the first with a capital letter."""
    steps: list[str] = []
    if "rbln-smi" in missing:
        steps.append("on a server with RBLN cards, install the vendor's driver, which brings rbln-smi and /dev/rbln*")
    elif "/dev/rbln*" in missing:
        steps.append("load the driver on a server with RBLN cards; in a container, pass the devices in")
    lacking = [name for name in missing if name.startswith(("vllm-rbln", COMPILER))]
    if lacking:
        packages = " and ".join(name.replace(" ", "==") for name in lacking)
        where = environment or "a virtual environment"
        ask = "" if environment else ", then ask for it: harness doctor --environment FOLDER"
        steps.append(f"with a portal account, install {packages} into {where} (docs/guides/npu.md, section 2){ask}")
    for place, step in enumerate(steps):
        yield step if place else step[0].upper() + step[1:]


def _device_groups(*, has_tool: bool) -> list[str]:
    """The groups of devices, which a model over several devices needs, by the driver's report."""
    if not has_tool:
        return []
    try:
        report = read_devices()
    except ServerError as error:
        return [f"device groups unknown: rbln-smi {error.what}"]
    groups = sorted({device.group for device in report.devices if device.group} if report else ())
    if groups:
        return [f"device groups {', '.join(groups)} (rbln-smi -g shows them)"]
    return ["no device group in its report, which a model over several devices needs (rbln-smi group makes one)"]


def libc_in_words(name: str, version: str, *, has_vllm: bool = False) -> str:
    """A C library, and where the CPU build of vLLM that vllm-rbln pins cannot load with it, what can.

    has_vllm: it is installed, so that nothing is left to choose.
    """
    if name != "glibc":
        return "no glibc; vLLM's wheels need it"
    if has_vllm or tuple(map(int, version.split(".")[:2])) >= GLIBC:
        return f"glibc {version}"
    least = ".".join(map(str, GLIBC))
    return f"glibc {version}, below the {least} of vLLM's CPU wheel: add {OLDER_GLIBC} to the install command"


def _check_stack(server: ServerSpec) -> None:
    """Refuse a stack that is not whole, not as declared, or not the one that compiled the model."""
    stack = find_rbln_stack(server.environment)
    folder = str(stack.vllm.parent.parent)

    def require_compiler() -> None:
        # The runtime comes with it.
        if COMPILER not in stack.versions:
            what = f"no {COMPILER} beside vllm-rbln: install it from the vendor's index"
            raise ServerError(what, where=folder, hint=f"harness doctor{_asked(server.environment)}")

    check_all(
        lambda: check_installed(server, stack.site_packages),
        lambda: require_fresh(Path(server.artifact), stack.versions),
        require_compiler,
        where=folder,
    )


def _check_devices(server: ServerSpec) -> None:
    """Refuse NPUs that are absent, ill or in use, and a host without the driver's tool."""
    if not find_command():
        what = "no rbln-smi on PATH: install the vendor's driver, which brings it"
        raise ServerError(what, where="this host", hint=f"harness doctor{_asked(server.environment)}")
    folder = Path(server.artifact)
    # A model that is not there is refused by itself.
    if server.devices or (folder / CONFIG_FILE).is_file():
        require_idle(server.devices or npus_of(server, read_artifact(folder).num_devices, None))


def _asked(environment: str) -> str:
    """The doctor's option for an environment."""
    return f" --environment {environment}" if environment else ""


def _of_stack() -> str:
    """The option that names the stack's environment, for a command that a person completes; "" with one on PATH."""
    try:
        find_rbln_stack("")
    except ServerError:
        return _asked("FOLDER")
    return ""


def _other_host() -> OtherHost:
    return service("server over ssh", where="server.ssh")


BACKEND = RblnBackend()
