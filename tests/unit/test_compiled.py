"""`policy.compile`: the same numbers under the same names, few compilations, and none where they would not end.

All but the last test trace and split graphs as the real thing does, and run them without generating code, which takes a
minute of C++ each.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from alignment.batches import Group, GroupBatch
from alignment.checkpoint_folder import write_checkpoint
from alignment.compiled import check_compiler, compile_layers, uncompiled
from alignment.errors import UserError
from alignment.export import export
from alignment.local_rollout import LocalRollout
from alignment.logprobs import LogProbEngine
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.rollout import SamplingConfig
from modules import DPO, SFT
from tests.architectures import DENSE, MIXTURES, build, ragged_batch, token_ids
from tests.toys import FixedData, groups, trainer

COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that is compiled, in order."""
    seen: list[Any] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(fw_compiler=count)))
    return seen


def step(model: torch.nn.Module, batch: GroupBatch, path: Any = "shared") -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and the gradient of some combination of them."""
    model.zero_grad()
    logps = LogProbEngine(model, path=path)(batch).logps
    assert logps is not None
    (logps * torch.linspace(-1.0, 1.5, len(logps))).sum().backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", ["shared", "plain"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_compiled_layers_give_the_same_log_probs_and_gradients(name: str, path: str, compiled: list[Any]) -> None:
    model, batch = build({**DENSE, **MIXTURES}[name]()), ragged_batch()
    expected, names = step(model, batch, path), list(model.state_dict())
    same(step(compile_layers(model), batch, path), expected)
    assert compiled
    assert list(model.state_dict()) == names


FORMS = {
    "all weights": {},
    "lora": {"lora": LoRAConfig(r=4)},
    "checkpointing": {"gradient_checkpointing": True},
    "lora, checkpointing": {"lora": LoRAConfig(r=4), "gradient_checkpointing": True},
    "4bit": {"lora": LoRAConfig(r=4), "quantization": "4bit"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_policy_compiles(form: str, compiled: list[Any]) -> None:
    plain, other = (load_policy(PolicyConfig(name="tiny", compile=on, **FORMS[form])) for on in (False, True))
    batch = GroupBatch.from_groups(groups(4, 3))
    same(step(other, batch), step(plain, batch))
    assert compiled
    assert list(other.state_dict()) == list(plain.state_dict())


def test_sizes_are_dynamic_from_the_start(compiled: list[Any]) -> None:
    """Further batches of several rows compile nothing; nor do further layers, of which there are three."""
    model = compile_layers(build(DENSE["llama"]()))
    shapes = [(7, (3, 5)), (9, (4, 8)), (30, (1, 2)), (12, (6, 7))]
    batches = [
        GroupBatch.from_groups(
            [Group(prompt=token_ids(p, k), completions=[token_ids(n, k) for n in own]) for k in range(3)]
        )
        for p, own in shapes
    ]
    step(model, batches[0])
    first = len(compiled)
    for batch in batches[1:]:
        step(model, batch)
    assert len(compiled) == first


def test_checks_and_rollouts_compile_nothing(compiled: list[Any]) -> None:
    model = build(DENSE["llama"]())
    prompts = [Group(prompt=[5, 6, 7], completions=(), index=0), Group(prompt=[8], completions=(), index=1)]

    def sampled() -> list[int]:
        engine = LocalRollout(model, pad_id=0, stop_ids=[2])
        return engine.generate(prompts, 3, SamplingConfig(max_tokens=9), seed=0, step=0).batch.completion_ids.tolist()

    expected = sampled()
    compile_layers(model)
    assert sampled() == expected
    LogProbEngine(model).verify()
    assert not compiled
    step(model, ragged_batch())
    assert compiled


def test_the_layers_are_compiled_again_after_an_error(compiled: list[Any]) -> None:
    model, ids = compile_layers(build(DENSE["llama"]())), torch.tensor([[5, 6, 7]])

    def interrupted() -> None:
        with uncompiled(model):
            model(input_ids=ids)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert not compiled
    model(input_ids=ids)
    assert compiled


# ---------------------------------------------------------------------- a run


def fit(folder: Path, policy: PolicyConfig, steps: int, **settings: Any) -> DPO:
    module = DPO(policy=policy, optim=OptimConfig(optimizer="sgd", lr=0.1, schedule="constant"))
    loop = trainer(folder, max_steps=steps, limit_val_batches=0)
    loop.fit(module, datamodule=FixedData(groups(8, 2)), **settings)
    loop.save_checkpoint(folder / f"{steps}.ckpt")
    return module


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
def test_checkpoints_are_those_of_a_run_without(lora: LoRAConfig | None, tmp_path: Path, compiled: list[Any]) -> None:
    """Three steps compiled; one compiled and two without, from its checkpoint; three without: the same weights.

    An epoch is one batch, and SGD keeps differences as small as they are."""
    without, within = (PolicyConfig(name="tiny", lora=lora, compile=on) for on in (False, True))
    expected = fit(tmp_path / "without", without, 3).state_dict()
    assert not compiled
    whole = fit(tmp_path / "within", within, 3).state_dict()
    assert compiled
    fit(tmp_path / "begun", within, 1)
    resumed = fit(tmp_path / "resumed", without, 3, ckpt_path=tmp_path / "begun" / "1.ckpt").state_dict()
    for found in (whole, resumed):
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def test_an_export_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SFT(policy=PolicyConfig(name="tiny", compile=True))
    monkeypatch.setattr("alignment.module.check_compiler", lambda *_: None)
    module.configure_model()
    write_checkpoint({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, tmp_path / "ckpt")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    exported = hf.AutoModelForCausalLM.from_pretrained(export(tmp_path / "ckpt", tmp_path / "out"))
    for name, value in exported.state_dict().items():
        assert torch.equal(value, module.policy.state_dict()[name])


# ---------------------------------------------------------------------- refusals


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("\nNo working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1 for more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(UserError) as caught:
        SFT(policy=PolicyConfig(name="tiny", compile=True)).configure_model()
    assert str(caught.value) == (
        "policy.compile needs torch.compile, which does not work here for cpu: No working C++ compiler found"
    )


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match="cannot tell the layers of Linear"):
        compile_layers(torch.nn.Linear(2, 2))


def test_a_callback_that_compiles_as_well_is_refused() -> None:
    module = SFT(policy=PolicyConfig(name="tiny", compile=True))
    module.register_transform("compile", lambda model: model)
    with pytest.raises(UserError, match="two settings ask for the model transform 'compile'"):
        load_policy(module.policy_config, module.transforms)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_generated_code_gives_the_same_log_probs_and_gradients() -> None:
    torch._dynamo.reset()
    check_compiler(torch.device("cpu"), "this test")
    plain, other = (load_policy(PolicyConfig(name="tiny", compile=on)) for on in (False, True))
    batch = GroupBatch.from_groups(groups(4, 3))
    same(step(other, batch), step(plain, batch))
