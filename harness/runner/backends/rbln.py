"""The NPUs of this host, or of another one over ssh, as a backend: ``vllm serve`` of a compiled artifact.

Refuses busy devices, and an artifact or a package that is not as declared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import ServerError, SpecError
from harness.kinds import KINDS, BackendKind
from harness.plugins import service
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
from harness.server.doctor import Check, first_line_of
from harness.server.life import LOOPBACK, LaunchPlan
from harness.server.process import require_port
from harness.spec import ServerSpec
from harness.stack.rbln.launch.artifacts import CONFIG_FILE, check_artifact, read_artifact
from harness.stack.rbln.launch.compile import require_fresh
from harness.stack.rbln.launch.devices import find_command, require_idle
from harness.stack.rbln.launch.releases import usable_with
from harness.stack.rbln.launch.serving import (
    OtherHost,
    ServedArtifact,
    ServeSetup,
    check_installed,
    find_rbln_stack,
    serve_plan,
)
from harness.stack.rbln.rules.kv_rules import NEWEST_STABLE, rule_set

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
    shown_keys: ClassVar[frozenset[str]] = STACK_KEYS | {"ssh"}

    def check_server(self, server: ServerSpec) -> None:
        check_compiled_server(server)

    def in_force(self, server: ServerSpec) -> dict[str, Any]:
        # Another host's stack is known once its server starts.
        return {} if server.ssh else rules_in_force(find_rbln_stack(server.environment).versions.get("vllm-rbln", ""))

    def check_host(self, server: ServerSpec) -> None:
        _require_artifact(server)
        if server.ssh:
            _other_host().check(server)
            return
        require_port(LOOPBACK, server.port)
        stack = find_rbln_stack(server.environment)
        check_installed(server, stack.site_packages)
        require_fresh(Path(server.artifact), stack.versions)
        filled_env(server.env, os.environ)

    @property
    def first_experiment(self) -> FirstExperiment:
        """With the first compiled model below ``artifacts``, where there is any."""
        about = "vllm-rbln on the NPUs of this host"
        stack = ('environment = ""', "virtual environment of vllm-rbln; empty: the vllm on PATH")
        folder = next((path.parent for path in sorted(ARTIFACTS.glob(f"*/{CONFIG_FILE}"))), None)
        if folder is None:
            artifact = ('artifact = ""', f"name the folder of the compiled model here: {COMPILE}")
            server = (artifact, stack, *SLOW_START)
            return FirstExperiment(about, server=server, needs=f"{COMPILE} plans/artifacts/qwen3-4b.toml")
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
        """Whether the vendor's packages, device tool and device files are present."""
        devices = sorted(path.name for path in Path("/dev").glob("rbln*"))
        tool = first_line_of("rbln-smi", "--version")
        try:
            stack = find_rbln_stack()
            versions = {name: stack.versions.get(name) for name in (*STACK, COMPILER)}
            present = ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items())
            has_stack = versions[COMPILER] is not None
            facts = [present, usable_with(stack.site_packages)]
        except ServerError as error:
            has_stack, facts = False, [error.what]
        facts += [
            "rbln-smi present" if tool is not None else "rbln-smi absent",
            f"{len(devices)} devices" if devices else "no /dev/rbln*",
        ]
        return Check(
            name="backend rbln",
            ok=True if has_stack and tool is not None and devices else None,
            found="; ".join(facts),
            need=f"vllm-rbln {VLLM_RBLN}, {COMPILER}, rbln-smi, /dev/rbln*",
            how="On a server with RBLN cards: install the vendor's driver (brings rbln-smi) and, with a portal "
            f"account, {COMPILER} from the vendor's package index; then pip install vllm-rbln=={VLLM_RBLN}",
        )

    def launch(self, server: ServerSpec, options: LaunchOptions) -> LaunchPlan:
        _require_artifact(server)
        if server.ssh:
            port = require_port(LOOPBACK, options.port)
            return _other_host().plan(server, backend=self.kind.name, port=port, run_folder=options.run_folder)
        artifact = Path(server.artifact).absolute()
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


def _other_host() -> OtherHost:
    return service("server over ssh", where="server.ssh")


def _require_artifact(server: ServerSpec) -> None:
    if not server.artifact:
        raise SpecError("is missing", where="server.artifact", hint="Name the folder of the compiled model")


BACKEND = RblnBackend()
