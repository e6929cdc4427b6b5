"""A server on another host as a LaunchPlan: the same command, patch, observer and refusals, laid out there over ssh.

``port`` is this host's end of the forwarded connection.
"""

from __future__ import annotations

import base64
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from harness.errors import SpecError
from harness.records import layout
from harness.redact import redacted_arguments, redacted_env
from harness.server.launch import LOOPBACK, LaunchPlan
from harness.spec import ServerSpec
from harness.stack.rbln.artifacts import blocks_override, requested_stack, settings_applied
from harness.stack.rbln.observer import INSIDE
from harness.stack.rbln.patches.shipped import Patch
from harness.stack.rbln.remote import host as remote
from harness.stack.rbln.serve_command import (
    SOCKET_FOLDER_VARIABLE,
    declared,
    logging_config,
    serve_arguments,
    server_env,
    visible_devices,
)

# A path that died without a word is given up by the other side after so long. ssh's own end notices after 30 s.
SILENCE_S = 60.0


def check_remote_server(server: ServerSpec) -> tuple[remote.RemoteHost, remote.RemoteStack, tuple[int, ...]]:
    """The host, its stack and the devices to use; refuses an artifact that does not fit and devices that are busy."""
    if not server.environment:
        raise SpecError(
            "is missing", where="server.environment", hint="Name the virtual environment of vllm on that host"
        )
    host = remote.RemoteHost(server.ssh, f"{server.environment}/bin/python")
    stack = remote.look(host, server.artifact)
    return host, stack, remote.check_remote(stack, server, host)


def remote_plan(server: ServerSpec, *, backend: str, port: int, run_folder: Path) -> LaunchPlan:
    """The same server on another host: the same arguments, environment, patch, observer and refusals."""
    host, stack, devices = check_remote_server(server)
    patch_record, patch, content = remote.patch_for(stack, server.patch, host.name)
    model = Path(server.artifact).name
    laid_out = host.call("prepare", _prepared(stack, patch, content))
    folder, remote_port = str(laid_out["folder"]), int(laid_out["port"])
    env = server_env(
        server,
        {
            **visible_devices(stack.versions.get("vllm-rbln", ""), devices),
            "VLLM_LOGGING_CONFIG_PATH": f"{folder}/{layout.SERVER_LOGGING}",
            SOCKET_FOLDER_VARIABLE: folder,
        },
        [*([] if content is None else [f"{folder}/overlay"]), *([f"{folder}/observer"] if server.observer else [])],
        Path(folder) / layout.OBSERVER if server.observer else None,
    )
    override = blocks_override(stack.config, server)
    arguments = serve_arguments(server, Path(server.artifact), remote_port, model, override)
    job: dict[str, Any] = {
        "argv": [f"{server.environment}/bin/vllm", *arguments],
        "env": env,
        "grace_s": server.stop_grace_s,
        "silence_s": SILENCE_S,
    }
    host.call("write", {"path": f"{folder}/job.json", "text": json.dumps(job)})
    life = _write_life(run_folder, host, folder, local_port=port, remote_port=remote_port)
    return LaunchPlan(
        backend=backend,
        argv=remote.life_command(life),
        host=LOOPBACK,
        port=port,
        model=model,
        env={"PYTHONUNBUFFERED": "1"},
        files={"remote": life},
        requested={
            **requested_stack(
                server, stack.config, versions=stack.versions, identity=stack.identity, devices=stack.devices
            ),
            "remote": {
                "host": stack.host,
                **job,
                "argv": list(redacted_arguments(job["argv"])),
                "env": redacted_env(job["env"]),
            },
        },
        observation=declared(server, patch_record),
        effective=settings_applied(server, stack.config, stack.versions, patch_record),
        device_command=() if stack.devices is None else tuple(host.command("rbln-smi", "-j")),
        read_offset=lambda: astuple(host.read_clock()),
    )


def _write_life(run_folder: Path, host: remote.RemoteHost, folder: str, *, local_port: int, remote_port: int) -> Path:
    """What the process that holds the server's life needs to know, as a file of the run folder."""
    path = (run_folder / layout.REMOTE).absolute()
    remote.write_job(
        path,
        {
            "host": host.name,
            "python": host.python,
            "ssh": list(host.ssh),
            "folder": folder,
            "local_port": local_port,
            "remote_port": remote_port,
            "observer": layout.OBSERVER,
            "observer_path": str((run_folder / layout.OBSERVER).absolute()),
            "silence_s": SILENCE_S,
            "ssh_log_path": str((run_folder / layout.SSH_LOG).absolute()),
        },
    )
    return path


def _prepared(stack: remote.RemoteStack, patch: Patch | None, content: bytes | None) -> dict[str, Any]:
    """What is laid out there first: the observer, the script of that host, the logging set-up, the overlay."""
    return {
        "files": {
            **remote.packed(INSIDE, "observer"),
            **{
                name: base64.b64encode(body).decode()
                for name, body in (
                    ("remote_host.py", remote.HOST_SCRIPT.read_bytes()),
                    (layout.SERVER_LOGGING, json.dumps(logging_config()).encode()),
                )
            },
        },
        "overlay": None
        if patch is None or content is None
        else {
            "site_packages": stack.site_packages,
            "package": patch.package,
            "target": patch.target,
            "content": base64.b64encode(content).decode(),
        },
    }
