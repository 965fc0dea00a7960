"""A server that answers as an OpenAI-compatible judge does, by a script; with what reads a judge's questions."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from alignment.rewards.judge import COMPARED, GRADED


@dataclass
class Asked:
    """One request: its headers and its messages, taken apart. `parts` is PROMPT, REPLY or REPLY A and REPLY B."""

    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def code(self) -> str:
        found = re.search(r"the code ([0-9a-f]{12})", self.body["messages"][0]["content"])
        assert found is not None
        return found[1]

    @property
    def user(self) -> str:
        return self.body["messages"][1]["content"]

    @property
    def parts(self) -> dict[str, str]:
        pattern = rf"=== ([A-Z ]+) {self.code} ===\n(.*?)\n=== END OF \1 {self.code} ==="
        return dict(re.findall(pattern, self.user, flags=re.DOTALL))

    @property
    def canary(self) -> bool:
        return self.parts["PROMPT"] == GRADED[0].prompt


@dataclass
class Reply:
    """What the server sends: a chat completion with `content`, or `raw`."""

    content: str | None = None
    status: int = 200
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    trickle_s: float = 0.0

    @property
    def data(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return json.dumps({"choices": [{"message": {"role": "assistant", "content": self.content}}]}).encode()


Script = Callable[[Asked], Reply]


@dataclass
class Judge:
    """A running server: its URL, what it was asked, and the most requests that it had at once."""

    script: Script
    url: str = ""
    seen: list[Asked] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    leave: threading.Event = field(default_factory=threading.Event)

    @property
    def replies(self) -> list[Asked]:
        """Without canaries."""
        return [asked for asked in self.seen if not asked.canary]


def verdict_on_canary(asked: Asked) -> str:
    """The right one."""
    parts = asked.parts
    if "REPLY" in parts:
        return f"{asked.code} {9 if parts['REPLY'] == GRADED[0].reply else 1}"
    return f"{asked.code} {'A' if parts['REPLY A'] == COMPARED[0].reply else 'B'}"


def grading(grade: Callable[[str], object]) -> Script:
    """Right on canaries; on others `grade` of the reply as it came, after the code."""

    def script(asked: Asked) -> Reply:
        return Reply(verdict_on_canary(asked) if asked.canary else f"{asked.code} {grade(asked.parts['REPLY'])}")

    return script


@contextmanager
def judging(script: Script) -> Iterator[Judge]:
    """A judge on this machine for the block."""
    judge = Judge(script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = Asked(dict(self.headers), body)
            with judge.lock:
                judge.seen.append(asked)
                judge.paths.append(self.path)
                judge.now += 1
                judge.most = max(judge.most, judge.now)
            try:
                reply = judge.script(asked)
            finally:
                with judge.lock:
                    judge.now -= 1
            try:
                self.send(reply)
            except OSError:  # the client has given up
                self.close_connection = True

        def do_GET(self) -> None:
            judge.paths.append(self.path)
            self.send(Reply("reached by a redirect"))

        def send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not reply.trickle_s:
                self.wfile.write(reply.data)
                return
            for byte in reply.data:
                self.wfile.write(bytes([byte]))
                time.sleep(reply.trickle_s)

        def log_message(self, *args: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.leave.set()
        server.shutdown()
        server.server_close()
        thread.join()
