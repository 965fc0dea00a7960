"""A server that keeps the requests and answers as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


@dataclass
class Stub:
    """What a server was asked, as (path, body), and how it answers."""

    url: str = ""
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answer: Answer = field(default=lambda path, body: as_vllm_does(path, body))

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


def choice(index: int, ids: list[int], reason: str = "stop") -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5 - i for i in range(len(ids))], "tokens": ["x"] * len(ids)}
    return {"index": index, "text": "", "token_ids": ids, "finish_reason": reason, "logprobs": logprobs}


def as_vllm_does(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/v1/completions":
        first = body["prompt"][0]
        choices = [choice(i, [first, 10 + i, 2]) for i in range(body["n"])]
        choices[-1] = choice(body["n"] - 1, [first] * body["max_tokens"], "length")
        return 200, {"choices": choices[::-1]}
    if path == "/get_world_size":
        return 200, {"world_size": 2}
    if path.startswith("/v1/"):
        return 200, "Success: LoRA adapter 'x' added successfully."
    return 200, {"message": "done"}


@contextmanager
def serving() -> Iterator[Stub]:
    """A server on this machine for the block."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            stub.seen.append((self.path, body))
            status, answer = stub.answer(self.path, body)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
