"""``python -m harness.measure.emulator``: run one emulator server in this process.

A wrong command ends with one line on stderr and a non-zero exit code.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from harness.errors import HarnessError, escape_controls


async def _serve(arguments: Sequence[str]) -> None:
    from harness.measure.emulator.config import config_from_arguments
    from harness.measure.emulator.server import EmulatorServer

    await EmulatorServer(config_from_arguments(arguments)).run()


def main(*arguments: str) -> int:
    """Serve until stopped; arguments: of the command line. The exit status of the process."""
    # aiohttp loads the system's certificates twice when it is imported, a sixth of the start; this process opens no
    # connection that would need them.
    os.environ["SSL_CERT_FILE"] = os.devnull
    try:
        asyncio.run(_serve(arguments))
    except HarnessError as error:
        sys.stderr.write(escape_controls(f"harness server emulator: {error}\n"))
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
