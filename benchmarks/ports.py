"""A port for two processes to meet at."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 20_000, 10_000
"""Below the range from which the system draws ports for connections: between choosing a port and listening on it lie
seconds of imports, and nobody takes this one meanwhile."""
_calls = itertools.count()


def meeting_port() -> int:
    """A port nobody listens on: another one on each call, and not the same in two processes side by side."""
    for _ in range(COUNT):
        port = FIRST + (os.getpid() * 7 + next(_calls)) % COUNT
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError("every port is taken")
