"""VLLMRollout against a server that keeps the requests and answers as vLLM does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from alignment import vllm_rollout
from alignment.batches import Group
from alignment.errors import UserError
from alignment.rollout import RolloutStopped, SamplingConfig, completion_keys
from alignment.vllm_rollout import VLLMRollout
from tests.architectures import DENSE, build
from tests.vllm_stub import Stub, as_vllm_does, choice, serving


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving() as stub:
        yield stub


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(vllm_rollout.time, "sleep", lambda _: None)


def engine(stub: Stub, folder: Path, weights: str = "disk", **options: Any) -> VLLMRollout:
    return VLLMRollout(stub.url + "/", model="policy", stop_ids=[2, 5], weights=weights, folder=folder, **options)


PROMPTS = [Group(prompt=[7, 8], completions=(), index=3), Group(prompt=[9], completions=(), index=1)]


# ---------------------------------------------------------------------------------------------------------- sampling


def test_the_request_says_everything_and_leaves_nothing_to_the_server(stub, tmp_path):
    sampling = SamplingConfig(max_tokens=6, min_tokens=1, top_k=9, top_p=0.9, min_p=0.01)
    engine(stub, tmp_path).generate(PROMPTS, 3, sampling, seed=11, step=4)
    assert stub.paths == ["/v1/completions"] * 2
    bodies = {tuple(body["prompt"]): body for _, body in stub.seen}
    assert bodies[7, 8] == {
        "model": "policy",
        "prompt": [7, 8],
        "n": 3,
        "seed": completion_keys(PROMPTS, 3, 11, 4)[0][0],
        "max_tokens": 6,
        "min_tokens": 1,
        "temperature": 1.0,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    assert bodies[9,]["seed"] != bodies[7, 8]["seed"]


def test_the_answer_becomes_a_rollout(stub, tmp_path):
    rollout = engine(stub, tmp_path).generate(PROMPTS, 3, SamplingConfig(max_tokens=4), seed=0, step=0)
    ids = [c.tolist() for c in torch.split(rollout.batch.completion_ids, rollout.batch.completion_lengths.tolist())]
    assert ids == [[7, 10, 2], [7, 11, 2], [7] * 4, [9, 10, 2], [9, 11, 2], [9] * 4]
    assert rollout.truncated.tolist() == [False, False, True] * 2
    assert rollout.sampler_logps.tolist() == [-0.5, -1.5, -2.5, -0.5, -1.5, -2.5, -0.5, -1.5, -2.5, -3.5] * 2
    assert rollout.batch.group_index.tolist() == [3, 1]
    assert rollout.weight_version == 0


def test_log_probs_the_server_cannot_give_are_refused(stub, tmp_path):
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        engine(stub, tmp_path).generate(PROMPTS, 1, SamplingConfig(temperature=0.6), seed=0, step=0)
    processed = engine(stub, tmp_path, logprobs_mode="processed")
    with pytest.raises(UserError, match="come after top_k, top_p, min_p and min_tokens"):
        processed.generate(PROMPTS, 1, SamplingConfig(top_p=0.9), seed=0, step=0)
    assert stub.seen == []
    processed.generate(PROMPTS, 1, SamplingConfig(temperature=0.6), seed=0, step=0)
    assert [body["temperature"] for _, body in stub.seen] == [0.6, 0.6]


def test_a_server_error_is_met_by_asking_again(stub, tmp_path):
    failures = iter([500, 503])

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status = next(failures, None)
        return as_vllm_does(path, body) if status is None else (status, {"error": "busy"})

    stub.answer = answer
    rollout = engine(stub, tmp_path).generate(PROMPTS[:1], 1, SamplingConfig(max_tokens=4), seed=0, step=0)
    assert rollout.batch.num_completions == 1
    assert len(stub.seen) == 3
    assert stub.seen[0] == stub.seen[2]


def test_a_rollout_that_is_asked_to_stop_does_not_wait_for_the_server(stub, tmp_path):
    held, asked = threading.Event(), []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        held.wait(120)
        return as_vllm_does(path, body)

    def should_stop() -> bool:
        asked.append(len(stub.seen))
        return len(asked) == 3

    stub.answer = answer
    stopping = engine(stub, tmp_path, concurrency=1, should_stop=should_stop)
    start = time.monotonic()
    with pytest.raises(RolloutStopped):
        stopping.generate(PROMPTS, 1, SamplingConfig(), seed=0, step=0)
    assert time.monotonic() - start < 60
    workers = [t for t in threading.enumerate() if t.name == "vllm-request"]
    assert [t.daemon for t in workers] == [True]
    held.set()
    workers[0].join(10)
    assert len(stub.seen) == 1  # the prompt that waited for its turn was never sent


def test_an_error_does_not_wait_for_the_other_answers(stub, tmp_path):
    held = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"] == [9]:
            return 404, {"error": "no"}
        held.wait(120)
        return as_vllm_does(path, body)

    stub.answer = answer
    start = time.monotonic()
    with pytest.raises(UserError, match="refused"):
        engine(stub, tmp_path).generate(PROMPTS, 1, SamplingConfig(), seed=0, step=0)
    assert time.monotonic() - start < 60
    held.set()


def test_a_refusal_is_told_in_the_servers_words(stub, tmp_path):
    stub.answer = lambda path, body: (404, {"error": "The model `policy` does not exist."})
    with pytest.raises(UserError, match=r"refused /v1/completions: 404 .*`policy` does not exist"):
        engine(stub, tmp_path).generate(PROMPTS[:1], 1, SamplingConfig(), seed=0, step=0)
    assert len(stub.seen) == 1


def test_no_server_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"vLLM server at http://127.0.0.1:9 does not answer /v1/completions"):
        engine(Stub(url="http://127.0.0.1:9"), tmp_path).generate(PROMPTS, 1, SamplingConfig(), seed=0, step=0)


@pytest.mark.parametrize(
    ("answered", "message"),
    [
        ([], "0 completions, 1 were asked for"),
        ([{**choice(0, [5]), "token_ids": None}], "no token ids or log-probs"),
        ([{**choice(0, [5]), "logprobs": {"token_logprobs": []}}], "0 log-probs, 1 tokens"),
        ([choice(0, [5], "abort")], "ended a completion by 'abort'"),
    ],
)
def test_an_answer_with_holes_is_refused(stub, tmp_path, answered, message):
    stub.answer = lambda path, body: (200, {"choices": answered})
    with pytest.raises(RuntimeError, match=message):
        engine(stub, tmp_path).generate(PROMPTS[:1], 1, SamplingConfig(), seed=0, step=0)


# ----------------------------------------------------------------------------------------------------------- weights


def test_disk_weights_follow_the_transfer_protocol(stub, tmp_path):
    model = build(DENSE["llama-tied"]())
    held: list[dict[str, torch.Tensor]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights":
            (file,) = Path(body["update_info"]["path"]).glob("*.safetensors")
            held.append(load_file(file))
        return as_vllm_does(path, body)

    stub.answer = answer
    rollout = engine(stub, tmp_path / "weights")
    rollout.sync(model, 1)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    rollout.sync(model, 2)
    update = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert stub.paths == ["/init_weight_transfer_engine", *update, *update]
    assert stub.seen[0][1] == {"init_info": {}}
    assert stub.seen[3][1] == {"update_info": {"path": str(tmp_path / "weights" / "version-1")}}
    assert stub.seen[9][1] == {"weight_version": "2"}
    assert not torch.equal(held[0]["model.norm.weight"], held[1]["model.norm.weight"])
    assert torch.equal(held[1]["model.norm.weight"], model.model.norm.weight)
    assert [f.name for f in (tmp_path / "weights").iterdir()] == ["version-2"]
    assert rollout.generate(PROMPTS, 1, SamplingConfig(), seed=0, step=0).weight_version == 2


def test_a_failed_update_leaves_the_server_paused_and_the_old_version(stub, tmp_path):
    model = build(DENSE["llama"]())
    rollout = engine(stub, tmp_path)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (500, {"error": "shape mismatch"}) if path == "/update_weights" else as_vllm_does(path, body)

    stub.answer = answer
    with pytest.raises(UserError, match=r"refused /update_weights: 500 .*shape mismatch"):
        rollout.sync(model, 1)
    assert "/resume" not in stub.paths
    assert stub.paths.count("/update_weights") == 1
    assert rollout.generate(PROMPTS, 1, SamplingConfig(), seed=0, step=0).weight_version == 0


def test_an_adapter_is_loaded_under_a_new_name_and_the_old_one_unloaded(stub, tmp_path):
    model = peft.get_peft_model(build(DENSE["llama"]()), peft.LoraConfig(r=2, target_modules="all-linear"))
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules="all-linear"))
    rollout = engine(stub, tmp_path, "lora")
    rollout.sync(model, 4)
    rollout.sync(model, 5)
    rollout.generate(PROMPTS[:1], 1, SamplingConfig(), seed=0, step=0)
    assert stub.seen[:3] == [
        ("/v1/load_lora_adapter", {"lora_name": "policy-4", "lora_path": str(tmp_path / "version-4")}),
        ("/v1/load_lora_adapter", {"lora_name": "policy-5", "lora_path": str(tmp_path / "version-5")}),
        ("/v1/unload_lora_adapter", {"lora_name": "policy-4"}),
    ]
    assert stub.seen[3][1]["model"] == "policy-5"
    (folder,) = tmp_path.iterdir()
    assert {f.name for f in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (folder / "reference").exists()


def test_nccl_goes_through_vllms_trainer_side(stub, tmp_path, monkeypatch):
    """A stand-in for vLLM's package with the calls its documentation gives; the transfer itself is vLLM's."""
    calls: list[tuple[str, Any]] = []

    class Factory:
        @staticmethod
        def trainer_init(*, init_info: Any, client: Any, source: Any) -> Any:
            calls.append(("init", (init_info, client, source)))
            return SimpleNamespace(send_weights=lambda: calls.append(("send", list(stub.paths))))

    package, nccl = ModuleType("vllm.distributed.weight_transfer"), ModuleType("nccl_engine")
    package.HTTPVLLMWeightSyncClient = lambda url: ("client", url)
    package.ModuleSource = lambda model: ("source", model)
    package.WeightTransferTrainerFactory = Factory
    nccl.NCCLTrainerInitInfo = SimpleNamespace
    for name, module in (
        ("vllm", ModuleType("vllm")),
        ("vllm.distributed", ModuleType("vllm.distributed")),
        ("vllm.distributed.weight_transfer", package),
        ("vllm.distributed.weight_transfer.nccl_engine", nccl),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    model = build(DENSE["llama"]())
    rollout = engine(stub, tmp_path, "nccl")
    rollout.sync(model, 1)
    rollout.sync(model, 2)
    (_, (info, client, source)), *sends = calls
    assert (info.world_size, info.rank) == (3, 0)
    assert 0 < info.master_port < 65536
    assert (client, source) == (("client", stub.url), ("source", model))
    assert [name for name, _ in sends] == ["send", "send"]
    assert stub.paths == ["/get_world_size", *["/pause?mode=wait", "/resume"] * 2]
    assert sends[0][1][-1] == "/pause?mode=wait"


@pytest.mark.parametrize(
    ("weights", "wrapped", "message"),
    [
        ("disk", True, "use weights='lora'"),
        ("nccl", True, "use weights='lora'"),
        ("nccl", False, "needs the extra 'vllm'"),
        ("lora", False, "has none; use weights='disk'"),
    ],
)
def test_a_way_that_does_not_fit_the_model_is_refused(stub, tmp_path, weights, wrapped, message):
    model = build(DENSE["llama"]())
    if wrapped:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(UserError, match=message):
        engine(stub, tmp_path, weights).sync(model, 1)
    assert stub.seen == []


def test_settings_are_checked_at_once(tmp_path):
    with pytest.raises(UserError, match="starts with http"):
        VLLMRollout("localhost:8000", model="m", stop_ids=[2], weights="disk", folder=tmp_path)
    with pytest.raises(UserError, match="needs a folder"):
        VLLMRollout("http://localhost:8000", model="m", stop_ids=[2], weights="lora")
