"""Other load generators against the same stamping server: how far apart their first requests arrive.

A peer is any command that sends a burst of completions requests; what it prints is not read, the server's own stamps
are. Nothing is installed here.
"""

from __future__ import annotations

import shlex
import subprocess
from typing import NamedTuple

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.measure.client.null_server import NullServer, NullServerConfig

NUM_REQUESTS = 64
TIMEOUT_S = 300.0
# Fields that a peer's command may name.
FIELDS = ("url", "host", "port", "num_requests")


class Peer(NamedTuple):
    """A load generator: a column's name, and its command with {url}, {host}, {port}, {num_requests} to be filled in."""

    name: str
    command: str


def parse_peer(text: str) -> Peer:
    """``NAME=COMMAND``. Raises SpecError when it is not, or when the command would not reach the server."""
    name, separator, command = text.partition("=")
    if not separator or not name.strip() or not command.strip():
        raise SpecError(f"{text!r} is not NAME=COMMAND", where="--peer", hint=example())
    if "{url}" not in command and "{port}" not in command:
        raise SpecError(f"the command of {name!r} names neither {{url}} nor {{port}}", where="--peer", hint=example())
    try:
        command.format(**dict.fromkeys(FIELDS, ""))
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise SpecError(
            f"the command of {name!r} has an unknown field ({error})", where="--peer", hint=known
        ) from error
    return Peer(name.strip(), command.strip())


def example() -> str:
    """A command that works, for help texts."""
    return (
        "For example: --peer 'vllm=vllm bench serve --backend vllm --base-url {url} --model null --tokenizer TOKENIZER "
        "--dataset-name random --num-prompts {num_requests} --request-rate inf --ignore-eos'"
    )


def peer_spread_ms(peer: Peer, server_command: list[str] | None) -> float:
    """Latest minus earliest arrival of the peer's last 64 requests, by the server's kernel stamps.

    Earlier ones are its own warm-up. Raises SpecError when the command cannot be run, fails or sends fewer.
    """
    with NullServer(NullServerConfig(), server_command) as server:
        url = f"http://{server.host}:{server.port}"
        filled = peer.command.format(url=url, host=server.host, port=server.port, num_requests=NUM_REQUESTS)
        try:
            ended = subprocess.run(
                shlex.split(filled), check=False, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise SpecError(f"cannot be run: {error}", where=f"--peer {peer.name}", hint=example()) from error
        arrivals = server.arrivals_ns()
    if ended.returncode or len(arrivals) < NUM_REQUESTS:
        printed = (ended.stderr or ended.stdout).strip().splitlines()
        raise SpecError(
            f"ended with exit code {ended.returncode} after {len(arrivals)} of {NUM_REQUESTS} requests: "
            f"{printed[-1] if printed else 'it printed nothing'}",
            where=f"--peer {peer.name}",
            hint="Run its command by hand to see more",
        )
    burst = sorted(arrivals)[-NUM_REQUESTS:]
    return (burst[-1] - burst[0]) / NS_PER_MS
