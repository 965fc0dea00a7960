"""Rollouts from a running vLLM server, over HTTP. Everything that knows vLLM is in this file.

Sampling goes through `/v1/completions` with token ids in and out. New weights reach the server in one of three ways:

disk  vLLM's weight-transfer API with its `disk` backend: the trainer writes safetensors to a folder both can see
      (the newest of the three backends; vLLM 0.33).
          VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "disk"}'
nccl  the same API with its `nccl` backend, through vLLM's own trainer-side class: GPU to GPU (vLLM 0.30, extra `vllm`).
          VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'
lora  the adapter alone, written to such a folder and loaded by name (a policy with LoRA).
          VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank R

Start it with `--generation-config vllm`, and with `--logprobs-mode processed_logprobs` unless the temperature is 1.
The server computes with other kernels than the trainer: correct for it with `alignment.mismatch`. Tested against a
server that only checks the requests; the weights' way over NCCL and a real server have not been exercised here.
"""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from alignment import distributed
from alignment.adapters import is_adapted
from alignment.batches import Group
from alignment.errors import UserError
from alignment.rollout import Rollout, RolloutStopped, SamplingConfig, assemble, completion_keys
from alignment.sharding import unsharded

# A request for completions that meets a closed connection or a server error is sent again, after 1 and 2 seconds.
_ATTEMPTS = 3

# Seconds between two looks at `should_stop`.
_POLL_EVERY = 0.1

_WAYS = ("disk", "nccl", "lora")


class VLLMRollout:
    """A RolloutEngine over a vLLM server.

    Args:
        url: of the server, for example `http://localhost:8000`.
        model: name the server serves the policy under (its `--served-model-name`, else the model's path).
        stop_ids: ids that end a completion unless `SamplingConfig.stop_ids` says otherwise (`rollout.stop_ids_of`).
        weights: how new weights reach the server; see the module docstring.
        folder: where `disk` and `lora` write them; the server must see it under the same absolute path.
        logprobs_mode: the server's `--logprobs-mode`: `raw` log-probs are those at temperature 1, `processed` ones come
            after temperature and filters.
        device: of the tensors that `generate` returns.
        timeout: seconds a request may take.
        concurrency: requests under way at once, one per prompt.
        should_stop: asked ten times a second while the server samples; when it says yes, `generate` raises
            RolloutStopped.

    With several ranks each sends its own prompts; rank 0 sends the weights.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        stop_ids: Sequence[int],
        weights: Literal["disk", "nccl", "lora"],
        folder: str | Path | None = None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
        concurrency: int = 256,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"the vLLM server's url starts with http:// or https://, got '{url}'")
        for name, value, known in (("weights", weights, _WAYS), ("logprobs_mode", logprobs_mode, ("raw", "processed"))):
            if value not in known:
                raise UserError(f"rollout.vllm: {name} is '{value}'; it is {' or '.join(known)}")
        if weights != "nccl" and folder is None:
            raise UserError(f"weights='{weights}' needs a folder that the vLLM server can read")
        self._server = _Server(url.rstrip("/"), timeout)
        self._model, self._stop_ids = model, list(stop_ids)
        self._logprobs_mode, self._device, self._concurrency = logprobs_mode, device, concurrency
        self._should_stop = should_stop
        self._version = 0
        path = Path(folder or ".").absolute()
        channels: dict[str, _Channel] = {
            "disk": _Disk(self._server, path),
            "lora": _Lora(self._server, path),
            "nccl": _Nccl(self._server),
        }
        self._channel = channels[weights]

    def generate(
        self,
        prompts: Sequence[Group],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int,
        step: int,
        earlier: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample n completions for each prompt; see `RolloutEngine`.

        The server draws by its own generator, seeded for each prompt from (seed, step, prompt index): other completions
        than LocalRollout's, and repeatable only as far as the server is. Raises UserError for settings under which the
        server's log-probs are not the ones a rollout promises, RuntimeError for an answer that is not one,
        RolloutStopped when asked to stop.
        """
        self._check_logprobs(sampling)
        seeds = [keys[0] for keys in completion_keys(prompts, n, seed, step, earlier)]
        requests = [self._request(prompt, n, sampling, s) for prompt, s in zip(prompts, seeds, strict=True)]
        answers = self._ask(requests)
        groups = [_choices(answer, n) for answer in answers]
        logps = [value for group in groups for choice in group for value in choice["logprobs"]["token_logprobs"]]
        cut = [choice["finish_reason"] == "length" for group in groups for choice in group]
        return assemble(
            prompts,
            [[choice["token_ids"] for choice in group] for group in groups],
            torch.tensor(logps, dtype=torch.float32),
            torch.tensor(cut, dtype=torch.bool),
            self._version,
            self._device,
        )

    def _ask(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answer to each request. Neither an error nor the wish to stop waits for the answers still to come."""
        answers: list[Future[dict[str, Any]]] = [Future() for _ in requests]
        left = iter(list(zip(requests, answers, strict=True)))  # a list's iterator gives each pair to one thread

        def work() -> None:
            for body, answer in left:
                if answer.set_running_or_notify_cancel():
                    try:
                        answer.set_result(self._server.post("/v1/completions", body, _ATTEMPTS))
                    except BaseException as error:  # a thread's error reaches nobody; here it reaches the one who waits
                        answer.set_exception(error)

        for _ in range(min(self._concurrency, len(requests))):
            # Daemons, unlike the threads of a pool: a process that leaves does not wait for the server.
            threading.Thread(target=work, name="vllm-request", daemon=True).start()
        try:
            while (state := wait(answers, timeout=_POLL_EVERY, return_when=FIRST_EXCEPTION)).not_done:
                for answer in state.done:
                    answer.result()
                if self._should_stop is not None and self._should_stop():
                    raise RolloutStopped("asked to stop during a rollout")
        finally:
            for answer in answers:
                answer.cancel()
        return [answer.result() for answer in answers]

    def sync(self, model: nn.Module, version: int) -> None:
        """Push the weights of `model` and sample from them from now on. Every rank must call it.

        Raises UserError where the way does not fit the model. After a failed push the server stays paused: it may hold
        a mixture of old and new weights.
        """
        error: Exception | None = None
        with unsharded(model):
            if distributed.rank() == 0:
                try:
                    self._model = self._channel.push(model, version, self._model)
                except (UserError, RuntimeError, OSError) as caught:
                    error = caught
        failed = distributed.any_rank(error is not None, self._device)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("rank 0 could not push the weights to the vLLM server")
        self._model = str(distributed.all_gather_objects(self._model)[0])
        self._version = version

    def _check_logprobs(self, sampling: SamplingConfig) -> None:
        if self._logprobs_mode == "raw" and sampling.score_temperature != 1.0:
            raise UserError(
                f"a vLLM server with raw log-probs reports them at temperature 1, not {sampling.temperature}: start it "
                "with --logprobs-mode processed_logprobs and set logprobs_mode=processed"
            )
        filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p or sampling.min_tokens
        if self._logprobs_mode == "processed" and filtered:
            raise UserError(
                "processed log-probs of a vLLM server come after top_k, top_p, min_p and min_tokens: leave these off, "
                "or sample at temperature 1 from a server with raw log-probs"
            )

    def _request(self, prompt: Group, n: int, sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt.prompt),
            "n": n,
            "seed": seed,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": self._stop_ids if sampling.stop_ids is None else sampling.stop_ids,
            # ours are the only stop tokens, and nothing of the model's generation config shapes the draw
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
        }


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError unless these are settings of VLLMRollout that a module can hand on, the required ones among them.
    Stop ids, device and the wish to stop are the module's to give."""
    parameters = inspect.signature(VLLMRollout).parameters
    known = [name for name in parameters if name not in ("stop_ids", "device", "should_stop")]
    unknown = sorted(set(settings) - set(known))
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in settings]
    if unknown or missing:
        wrong = f"has no setting {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise UserError(f"rollout.vllm {wrong}; its settings are {', '.join(known)}")


def _choices(answer: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The n completions of an answer in order. Raises RuntimeError when something is missing."""
    choices = sorted(answer.get("choices", []), key=lambda choice: int(choice["index"]))
    if len(choices) != n:
        raise RuntimeError(f"the vLLM server returned {len(choices)} completions, {n} were asked for")
    for choice in choices:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None or logprobs is None:
            raise RuntimeError("the vLLM server returned no token ids or log-probs; it must be vLLM 0.30 or later")
        if len(logprobs["token_logprobs"]) != len(ids):
            raise RuntimeError(
                f"the vLLM server returned {len(logprobs['token_logprobs'])} log-probs, {len(ids)} tokens"
            )
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"the vLLM server ended a completion by '{choice['finish_reason']}'")
    return choices


class _Server:
    """JSON over HTTP."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self._timeout = url, timeout

    def post(self, path: str, body: dict[str, Any] | None = None, attempts: int = 1) -> dict[str, Any]:
        data = json.dumps(body or {}).encode()
        return self._send(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), attempts)

    def get(self, path: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(self.url + path), 1)

    def _send(self, request: urllib.request.Request, attempts: int) -> dict[str, Any]:
        """Raises UserError with the server's own words for a refusal, and when it cannot be reached."""
        for attempt in range(1, attempts + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    text = response.read()
                break
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt == attempts:
                    said = error.read(500).decode(errors="replace")
                    raise UserError(f"the vLLM server refused {request.selector}: {error.code} {said}") from error
            except OSError as error:  # urllib's URLError, a reset connection, a time-out
                if attempt == attempts:
                    raise UserError(
                        f"the vLLM server at {self.url} does not answer {request.selector}: {error}"
                    ) from error
            time.sleep(attempt)
        parsed = json.loads(text) if text.strip().startswith(b"{") else {}  # the LoRA routes answer in plain words
        return dict(parsed)


# ----------------------------------------------------------------------------------------------------- ways of weights


class _Channel(Protocol):
    def push(self, model: nn.Module, version: int, name: str) -> str:
        """Make the server sample from `model`; returns the name it serves it under (`name` is the present one)."""
        ...


class _Disk:
    def __init__(self, server: _Server, folder: Path) -> None:
        self._server, self._folder, self._ready = server, folder, False

    def push(self, model: nn.Module, version: int, name: str) -> str:
        if not isinstance(model, PreTrainedModel):
            raise UserError(f"weights='disk' pushes a whole model, not a {type(model).__name__}; use weights='lora'")
        path = _written(self._folder, version, model.save_pretrained)
        if not self._ready:
            self._server.post("/init_weight_transfer_engine", {"init_info": {}})
            self._ready = True
        self._server.post("/pause?mode=wait")  # which also clears the prefix cache: it belongs to the old weights
        self._server.post("/start_weight_update")
        self._server.post("/update_weights", {"update_info": {"path": str(path)}})
        self._server.post("/finish_weight_update", {"weight_version": str(version)})
        self._server.post("/resume")
        _drop_others(path)
        return name


class _Nccl:
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._engine: Any = None

    def push(self, model: nn.Module, version: int, name: str) -> str:
        if not isinstance(model, PreTrainedModel):
            raise UserError(f"weights='nccl' pushes a whole model, not a {type(model).__name__}; use weights='lora'")
        if self._engine is None:
            self._engine = self._connect(model)
        self._server.post("/pause?mode=wait")
        self._engine.send_weights()
        self._server.post("/resume")
        return name

    def _connect(self, model: nn.Module) -> Any:
        try:
            from vllm.distributed.weight_transfer import (
                HTTPVLLMWeightSyncClient,
                ModuleSource,
                WeightTransferTrainerFactory,
            )
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise UserError(f"weights='nccl' needs the extra 'vllm' beside the trainer: {error}") from error
        workers = int(self._server.get("/get_world_size")["world_size"])
        host = socket.gethostbyname(socket.gethostname())
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        return WeightTransferTrainerFactory.trainer_init(
            init_info=NCCLTrainerInitInfo(master_address=host, master_port=port, world_size=workers + 1, rank=0),
            client=HTTPVLLMWeightSyncClient(self._server.url),
            source=ModuleSource(model),
        )


class _Lora:
    def __init__(self, server: _Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._loaded: str | None = None

    def push(self, model: nn.Module, version: int, name: str) -> str:
        if not is_adapted(model):
            raise UserError(
                f"weights='lora' pushes an adapter, and a {type(model).__name__} has none; use weights='disk'"
            )

        def write(path: Path) -> None:
            model.save_pretrained(str(path), selected_adapters=list(model.active_adapters))

        path = _written(self._folder, version, write)
        # A name of its own for each version: the server's prefix cache knows adapters by name.
        adapter = f"policy-{version}"
        self._server.post("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": str(path)})
        if self._loaded is not None:
            self._server.post("/v1/unload_lora_adapter", {"lora_name": self._loaded})
        self._loaded = adapter
        _drop_others(path)
        return adapter


def _written(folder: Path, version: int, write: Callable[[Path], object]) -> Path:
    """Write weights beside their place, then rename: the server never sees half of them."""
    path, partial = folder / f"version-{version}", folder / f"version-{version}.partial"
    for old in (path, partial):
        if old.exists():
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    write(partial)
    partial.rename(path)
    return path


def _drop_others(path: Path) -> None:
    """Delete earlier versions; the server has read the new one."""
    for other in path.parent.glob("version-*"):
        if other != path:
            shutil.rmtree(other)
