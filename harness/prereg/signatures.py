"""Signatures with SSH keys, made and verified by ``ssh-keygen -Y``; this module never reads a key.

A signature shows which key signed. A file of allowed signers names the holder of each key.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.errors import RecordsError, SpecError

NAMESPACE = "harness"
TIMEOUT_S = 120.0
SUFFIX = ".sig"


def signature_of(path: Path) -> Path:
    """Path of the signature of a file."""
    return path.with_name(path.name + SUFFIX)


def sign_file(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key (private, or public with its agent); SpecError when that is refused."""
    signature_of(path).unlink(missing_ok=True)
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(path))
    if done.returncode:
        raise SpecError(
            f"did not sign: {_last_line(done)}", where=str(key), hint="Name a key made by ssh-keygen -t ed25519"
        )
    return signature_of(path)


def check_signature(path: Path, signature: Path, signers: Path | None = None) -> str:
    """The signer of a file; RecordsError when the signature does not hold.

    signers: a file of allowed signers (see ssh-keygen), to get the name of the signer instead of the key.
    """
    content = path.read_bytes()
    if signers is None:
        done = _ssh_keygen("check-novalidate", "-n", NAMESPACE, "-s", str(signature), content=content)
    else:
        found = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(signers))
        names = found.stdout.decode("utf-8", "replace").splitlines()
        name = names[0].strip() if names and not found.returncode else "nobody"
        done = _ssh_keygen(
            "verify", "-f", str(signers), "-I", name, "-n", NAMESPACE, "-s", str(signature), content=content
        )
    if done.returncode:
        raise RecordsError(
            f"its signature does not hold ({_last_line(done)})", where=str(path), hint="Restore both from a copy"
        )
    line = done.stdout.decode("utf-8", "replace").strip()
    return line.removeprefix(f'Good "{NAMESPACE}" signature ').removeprefix("for ").removeprefix("with ")


def _ssh_keygen(action: str, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *arguments], input=content, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SpecError(f"cannot be run: {error}", where="ssh-keygen", hint="Install OpenSSH 8.2 or newer") from error


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
