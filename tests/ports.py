"""A port for two processes to meet at."""

from __future__ import annotations

import os
import socket

FIRST, COUNT = 20_000, 10_000
"""Below the range from which the system draws ports for connections: between choosing a port and listening on it lie
seconds of imports, and nobody takes this one meanwhile."""


def meeting_port() -> int:
    """A port nobody listens on, not the same in two test runs side by side."""
    for step in range(COUNT):
        port = FIRST + (os.getpid() * 7 + step) % COUNT
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError("every port is taken")
