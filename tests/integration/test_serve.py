"""`transformers serve` answers with an exported policy, in the words the trained policy would use."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignment.export import export
from alignment.policy import LoRAConfig, PolicyConfig
from modules import SFT

pytest.importorskip("openai", reason="transformers serve needs it")

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def trained() -> SFT:
    """A module whose adapters are not what they were at the start."""
    module = SFT(policy=PolicyConfig(name="tiny", lora=LoRAConfig(r=4)))
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.fixture(scope="module")
def server(trained: SFT, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a server and the folder it serves."""
    folder = export(trained, tmp_path_factory.mktemp("serve") / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", folder, "--host", "127.0.0.1"]
    with (folder.parent / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in (*command, "--port", port, "--device", "cpu")],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        wait(port, process, folder.parent / "log")
        yield port, folder
    finally:
        process.terminate()
        process.wait(30)


def wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if ask(port, "GET", "/health")["status"] == "ok":
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def ask(port: int, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    answer: dict[str, object] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.mark.slow
def test_a_chat_with_the_exported_policy(server: tuple[int, Path], trained: SFT) -> None:
    port, folder = server
    body = {"model": str(folder), "messages": MESSAGES, "max_tokens": 8, "stream": False}
    answer = ask(port, "POST", "/v1/chat/completions", body)
    tokenizer = trained.tokenizer
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = trained.policy.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert expected.strip()
    assert answer["choices"][0]["message"]["content"] == expected
