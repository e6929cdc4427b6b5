"""What tests run as ``ssh``: the "other host" is this one. Options are those the real client takes; -L forwards.

Usage: stand_in_ssh.py [-o OPTION]... [-L address:port:address:port] -- HOST COMMAND
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _forward(listener: socket.socket, port: int) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=ends, daemon=True).start()


def main(words: list[str]) -> int:
    while words[0] in ("-o", "-L"):
        option, value, words = words[0], words[1], words[2:]
        if option == "-L":
            local, remote = int(value.split(":")[1]), int(value.split(":")[3])
            listener = socket.create_server(("127.0.0.1", local))
            threading.Thread(target=_forward, args=(listener, remote), daemon=True).start()
    assert words[0] == "--"
    host, command = words[1:]
    if host == "nowhere":
        print("ssh: connect to host nowhere port 22: No route to host", file=sys.stderr)
        return 255
    # A login shell of the other host may greet first.
    if os.environ.get("GREETING"):
        print("Welcome to", host, flush=True)
    # Of another host, so in no process group of this one's.
    return subprocess.run(["/bin/sh", "-c", command], check=False, start_new_session=True).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
