"""`alignment ui`: the MLflow UI over the local database. Bound to 127.0.0.1 and to nothing else: it has no login."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from alignment.errors import UserError

HOST = "127.0.0.1"


def command(root: Path, port: int) -> list[str]:
    """The command that serves `<root>/mlflow.db`. Raises FileNotFoundError when there is none yet."""
    database = root.resolve() / "mlflow.db"
    if not database.is_file():
        raise FileNotFoundError(f"no runs yet: {database} does not exist; start one, or name its folder with --root")
    uri = f"sqlite:///{database}"
    options = {
        "--backend-store-uri": uri,
        "--default-artifact-root": str(root.resolve() / "artifacts"),
        "--host": HOST,
        "--port": str(port),
        "--uvicorn-opts": "--log-level warning",  # else a line for every picture a page loads
    }
    return [sys.executable, "-m", "mlflow", "ui", *(word for option in options.items() for word in option)]


def _check_free(port: int) -> None:
    """Raises UserError for a port that cannot be had: the server would say so under a page of its own lines."""
    if not 0 < port < 65536:
        raise UserError(f"--port {port}: a port is a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just stopped is no hindrance
        try:
            probe.bind((HOST, port))
        except OSError as ex:
            raise UserError(f"port {port} cannot be used ({ex.strerror}); choose another with --port") from ex


def main(argv: list[str]) -> NoReturn:
    """Become the server: signals reach it directly, and its exit status is ours."""
    parser = argparse.ArgumentParser(prog="alignment ui", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("."), help="folder that holds mlflow.db (default: here)")
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 (default: 5000)")
    options = parser.parse_args(argv)
    words = command(options.root, options.port)
    _check_free(options.port)
    # Without the query the UI opens on its pages for agents.
    page = f"http://{HOST}:{options.port}/#/experiments?workflowType=machine_learning"
    print(f"MLflow UI: {page} (stop with Ctrl-C)", flush=True)
    # What the server and its libraries say of themselves; nobody here can act on it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.execv(words[0], words)
