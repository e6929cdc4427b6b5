"""A process of the twin's Python that has loaded the real stack: servers are forked from it and load nothing.

``stack_servers`` starts it. Its words: a name in the abstract namespace of sockets, the pid of the tests, a folder from
which to import the harness's supervisor, and the modules to load. It ends with the tests.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# The folder of this file, which Python put first.
del sys.path[0]
LOOK_EVERY_S = 1.0


def main(name: str, tests: str, checkout: str, *modules: str) -> None:
    """Load the modules, then fork a supervisor for each that asks; ends when the tests have."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:
            # Another one has the name.
            return
        listener.listen(64)
        sys.path.append(checkout)
        supervisor = import_module("harness.measure.server.supervisor")
        sys.path.remove(checkout)
        for module in modules:
            import_module(module)
        gc.collect()
        gc.freeze()
        listener.settimeout(LOOK_EVERY_S)
        while Path("/proc", tests).exists():
            with suppress(OSError), listener.accept()[0] as asked:
                _fork(supervisor, listener, asked)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _fork(supervisor: Any, listener: socket.socket, asked: socket.socket) -> None:
    asked.settimeout(None)
    descriptors = socket.recv_fds(asked, 16, 2)[1]
    if len(descriptors) < 2:
        # Who asked has ended.
        return
    control, status = descriptors
    if (pid := os.fork()) == 0:
        listener.close()
        asked.close()
        os.setsid()
        os.execvpe = _become
        code = 1
        try:
            code = supervisor.main(str(control), str(os.getppid())) or 0
        finally:
            os.write(status, str(code).encode())
            os._exit(code)
    for number in (control, status):
        os.close(number)
    asked.sendall(str(pid).encode())


def _become(_file: str, argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """As the system, Python and the command ``vllm`` do before its ``main``, but with the modules of this process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # that of the listing itself
            if number > 2 and fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(number)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = list(argv)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    for tree in ("vllm", "vllm_rbln"):
        logging.getLogger(tree).handlers.clear()
        import_module(f"{tree}.logger")._configure_vllm_root_logger()
    os._exit(_ended(import_module("vllm.entrypoints.cli.main").main))


def _ended(main: Any) -> int:
    """The exit status of a program, after what is done at its exit."""
    code: Any = 1
    try:
        code = main() or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main(*sys.argv[1:])
