"""A real sshd on a loopback port, for one test: throwaway keys in a folder of its own, and a client configuration."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.measure.server.process import free_port
from tests.support.processes import NO_PORT, comes_true

SERVER = "/usr/sbin/sshd"
RUN_FOLDER = Path("/run/sshd")  # where sshd started by root wants to lock its children in


def make_key(path: Path) -> None:
    """A new key, as OpenSSH makes it; for a user who has a number only it makes none, and the test is skipped."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        pytest.skip("OpenSSH does nothing for a user without a name")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@contextmanager
def running_sshd(folder: Path, variables: Mapping[str, str]) -> Generator[Path]:
    """Serve logins of this user as host "npu1" of the configuration file that is given; "nowhere" has no server.

    variables: of the environment of every login. Skips the test where OpenSSH's server or client is not installed.
    """
    if not (Path(SERVER).is_file() and shutil.which("ssh", path="/usr/bin") and shutil.which("ssh-keygen")):
        pytest.skip("no OpenSSH server here (Debian, Ubuntu: apt install openssh-server openssh-client)")
    folder.mkdir()
    for name in ("host_key", "user_key"):
        make_key(folder / name)
    port, user = free_port(), pwd.getpwuid(os.getuid()).pw_name
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
        + "".join(f"SetEnv {name}={value}\n" for name, value in variables.items())
    )
    (folder / "config").write_text(
        f"Host npu1\n  Port {port}\nHost nowhere\n  Port {NO_PORT}\nHost *\n  HostName 127.0.0.1\n  User {user}\n"
        f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        "  StrictHostKeyChecking yes\n"
    )
    if os.geteuid() == 0:
        # Left there: the sshd of a test that runs beside this one needs it for every login.
        RUN_FOLDER.mkdir(mode=0o755, exist_ok=True)
    with subprocess.Popen([SERVER, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]) as server:
        try:
            _wait_for(port)
            yield folder / "config"
        finally:
            server.terminate()
            server.wait()


@contextmanager
def short_folder(link: Path) -> Generator[Path]:
    """A new folder with a path short enough for what a server puts into its TMPDIR, sockets among it; ``link`` leads
    there.
    """
    with tempfile.TemporaryDirectory(prefix="npu1-", dir="/tmp") as folder:
        link.symlink_to(folder)
        yield Path(folder)


def write_command(path: Path, line: str) -> None:
    """A shell script of one line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _wait_for(port: int) -> None:
    def answers() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    assert comes_true(answers), "sshd did not start"
