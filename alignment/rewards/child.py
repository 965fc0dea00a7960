"""The inside of a reward worker: a plain process that waits for calls on a socket, makes them and reports.

It is started by `alignment.rewards.workers` with nothing of the trainer in it: no torch, no GPU, no descriptors but the
socket. Frames are 8 bytes of length and a body. A call arrives as two: a JSON header and pickled arguments; answers are
JSON, so that nothing a reward returns is ever unpickled by the trainer.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from alignment.errors import UserError
from alignment.rewards.calls import (
    Function,
    Source,
    Wanted,
    call_batch,
    call_one,
    describe,
    load,
    reseed,
    single,
    wanted,
)
from alignment.rewards.protocol import Outcome

LENGTH = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1
# Sent by terminals and schedulers to whole process groups; whether a worker ends is for its trainer to say.
OUTLIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Channel:
    """Frames over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        self._connection = connection
        self._owner = os.getpid()

    def read(self) -> bytes | None:
        """The next frame's body, None when the trainer has hung up."""
        length = self._stream.read(LENGTH.size)
        if len(length) < LENGTH.size:
            return None
        return self._stream.read(LENGTH.unpack(length)[0])

    def send(self, message: object) -> None:
        if os.getpid() != self._owner:
            os._exit(0)  # a reward has forked and both processes came back from it: only one may answer
        body = json.dumps(message).encode()
        self._connection.sendall(LENGTH.pack(len(body)) + body)


class Server:
    """Loads rewards when they are first asked for, and calls them."""

    def __init__(self, channel: Channel, sources: Mapping[str, Source], seed: int) -> None:
        self._channel, self._sources, self._seed = channel, sources, seed
        self._loaded: dict[str, tuple[Function, Wanted]] = {}

    def serve(self, name: str, start: int, body: bytes) -> None:
        """Answer with what the reward wants, then with outcomes from completion `start` on.

        A reward of single completions answers one by one: should the worker die, the trainer knows on which.
        """
        try:
            if name not in self._loaded:
                reward = load(self._sources[name])
                self._loaded[name] = (reward, wanted(reward))
            arguments, keys = pickle.loads(body) if body else ({}, [])
        except BaseException as error:  # a user's import may raise anything, SystemExit included
            self._channel.send({"failed": str(error) if isinstance(error, UserError) else describe(error)})
            return
        reward, wants = self._loaded[name]
        self._channel.send({"wanted": wants})
        if wants.per_sample:
            for i in range(start, len(keys)):
                reseed(self._seed, name, [keys[i]])
                self._answer([call_one(reward, single(arguments, i), in_worker=True)])
        elif keys:
            reseed(self._seed, name, keys)
            self._answer(call_batch(reward, arguments, len(keys), in_worker=True))

    def _answer(self, outcomes: Sequence[Outcome]) -> None:
        self._channel.send({"outcomes": outcomes})


def main(descriptor: int, parent: int) -> None:
    """Serve until the trainer hangs up."""
    _die_with(parent)
    for number in OUTLIVED:
        signal.signal(number, _outlive)  # a handler, not SIG_IGN, which programs started by a reward would inherit
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs started by a reward have no use for it
    channel = Channel(connection)
    setup: dict[str, Any] = pickle.loads(channel.read() or b"")
    _limit(setup["memory_mb"])
    server = Server(channel, setup["sources"], setup["seed"])
    while (header := channel.read()) is not None:
        call = json.loads(header)
        body = channel.read()
        if body is None:
            return
        server.serve(call["name"], call["start"], body)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the trainer's thread that owns it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(memory_mb: int) -> None:
    # Private writable memory, not address space: mapped libraries are no cost.
    most = memory_mb << 20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _outlive(number: int, frame: FrameType | None) -> None:
    pass
