"""Exports: the folder loads with plain transformers, gives the trained logits, and appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from alignment import export as export_module
from alignment.checkpoint_folder import CheckpointError, write_checkpoint
from alignment.errors import UserError
from alignment.export import export, generation_config
from alignment.export_command import main
from alignment.policy import LoRAConfig, PolicyConfig, load_policy, load_tokenizer
from alignment.runs import run_folder, write_record
from alignment.tiny import save_tiny, tiny_model, tiny_tokenizer
from modules import SFT

IDS = torch.tensor([[1, 40, 41, 42, 3]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def trained(config: PolicyConfig) -> SFT:
    """A module whose trainable weights are not what they were at the start."""
    module = SFT(policy=config)
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return module


def checkpoint(module: SFT, folder: Path) -> Path:
    """What Lightning hands to the checkpoint plug-in, as far as an export reads it."""
    write_checkpoint({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", seed=3)


CONFIGS = {
    "all weights": {},
    "lora": {"lora": LoRAConfig(r=4)},
    "checkpointing": {"lora": LoRAConfig(r=4), "gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_from_pretrained_gives_the_trained_logits(tmp_path: Path, base: Path, case: str, from_checkpoint: bool) -> None:
    module = trained(PolicyConfig(name=str(base), **CONFIGS[case]))
    weights = {n: v.clone() for n, v in module.state_dict().items()}
    out = export(checkpoint(module, tmp_path / "ckpt") if from_checkpoint else module, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not isinstance(model, PeftModel)
    assert torch.allclose(logits(model), logits(module.policy), atol=1e-5, rtol=0)
    assert (logits(model) - logits(tiny_model(seed=3))).abs().max() > 0.1
    assert all(torch.equal(v, weights[n]) for n, v in module.state_dict().items()), "exporting changed the live module"
    assert list(out.glob("*.safetensors"))
    assert not list(out.glob("*.bin"))


def test_weights_without_adapters_are_exported_bit_for_bit(tmp_path: Path) -> None:
    module = trained(PolicyConfig())
    model = AutoModelForCausalLM.from_pretrained(export(module, tmp_path / "out"))
    assert torch.equal(logits(model), logits(module.policy))


def test_the_folder_chats(tmp_path: Path) -> None:
    out = export(trained(PolicyConfig(name="tiny")), tmp_path / "out")
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    messages = [{"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    reply = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert inputs["input_ids"].shape[1] < reply.shape[1] <= inputs["input_ids"].shape[1] + 5
    assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_every_id_that_ends_a_reply_is_in_the_generation_config(tmp_path: Path) -> None:
    """The model knows 5, the tokenizer <bos>, the template ends turns with <|im_end|>; none of them is lost."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [5, 7]
    tokenizer.eos_token = "<bos>"
    config = generation_config(model, tokenizer)
    assert config.eos_token_id == [1, 3, 5, 7]
    assert config.pad_token_id == 0
    out = export(trained(PolicyConfig()), tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [3]


def test_an_adapter_folder_loads_on_its_base(tmp_path: Path, base: Path) -> None:
    module = trained(PolicyConfig(name=str(base), lora=LoRAConfig(r=4)))
    out = export(module, tmp_path / "adapter", merge_lora=False)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {p.name for p in out.iterdir()}
    assert not (out / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(out)  # transformers follows the adapter to its base
    ours = load_policy(PolicyConfig(name=str(base), lora=LoRAConfig(pretrained=str(out))))
    assert torch.allclose(logits(plain), logits(module.policy), atol=1e-6)
    assert torch.equal(logits(ours), logits(module.policy))


def test_an_adapter_without_a_loadable_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="export it merged"):
        export(trained(PolicyConfig(lora=LoRAConfig(r=2))), tmp_path / "out", merge_lora=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_is_merged_in_full_precision(tmp_path: Path, base: Path, quantization: str) -> None:
    module = trained(PolicyConfig(name=str(base), lora=LoRAConfig(r=4), quantization=quantization))
    model = AutoModelForCausalLM.from_pretrained(export(checkpoint(module, tmp_path / "ckpt"), tmp_path / "out"))
    full = load_policy(PolicyConfig(name=str(base), lora=LoRAConfig(r=4)))
    adapter = {n: v for n, v in module.policy.state_dict().items() if "lora_" in n}
    assert full.load_state_dict(adapter, strict=False).unexpected_keys == []
    assert torch.allclose(logits(model), logits(full), atol=1e-5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_pretrained_adapter_is_continued_and_merged(tmp_path: Path, base: Path) -> None:
    first = export(trained(PolicyConfig(name=str(base), lora=LoRAConfig(r=4))), tmp_path / "first", merge_lora=False)
    module = trained(PolicyConfig(name=str(base), lora=LoRAConfig(pretrained=str(first))))
    model = AutoModelForCausalLM.from_pretrained(export(checkpoint(module, tmp_path / "ckpt"), tmp_path / "out"))
    assert torch.allclose(logits(model), logits(module.policy), atol=1e-5)


# ----------------------------------------------------------------------------------------------------- safe writes, CLI


def test_a_failed_export_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    module = trained(PolicyConfig())
    out = export(module, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(type(module.tokenizer), "save_pretrained", full)  # after the weights were written
    with pytest.raises(OSError, match="No space"):
        export(module, tmp_path / "new")
    with pytest.raises(OSError, match="No space"):
        export(module, out, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == before


def test_a_failed_rename_puts_the_earlier_export_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = trained(PolicyConfig())
    out = export(module, tmp_path / "out")
    rename = export_module.os.rename

    def failing(source: Path, target: Path) -> None:
        if "partial" in Path(source).name:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(export_module.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        export(module, out, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert isinstance(AutoModelForCausalLM.from_pretrained(out), PreTrainedModel)


def test_what_is_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    module = trained(PolicyConfig())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not empty"):
        export(module, tmp_path / "thesis")
    with pytest.raises(UserError, match="does not delete it"):
        export(module, tmp_path / "thesis", force=True)
    with pytest.raises(UserError, match="is not a folder"):
        export(module, tmp_path / "file", force=True)
    out = export(module, tmp_path / "empty")
    with pytest.raises(UserError, match="is not empty"):
        export(module, out)
    assert export(module, out, force=True) == out
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_the_command(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = trained(PolicyConfig(name=str(base), lora=LoRAConfig(r=4)))
    folder = str(checkpoint(module, tmp_path / "ckpt"))
    assert main([folder, str(tmp_path / "out")]) == 0
    assert f"transformers chat {tmp_path / 'out'}" in capsys.readouterr().out
    assert main([folder, str(tmp_path / "out"), "--force", "--merge_lora", "false"]) == 0
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    with pytest.raises(CheckpointError):
        main([str(tmp_path / "nothing"), str(tmp_path / "new")])
    with pytest.raises(UserError, match="preference of a policy with heads"):
        main([folder, str(tmp_path / "new"), "--weights", "{kind: 2}"])


def test_a_checkpoint_of_something_else_is_one_line(tmp_path: Path) -> None:
    write_checkpoint({"state_dict": {}, "hyper_parameters": {"width": 3}}, tmp_path / "other")
    with pytest.raises(UserError, match="no hyper-parameter 'policy'"):
        export(tmp_path / "other", tmp_path / "out")
    module = trained(PolicyConfig())
    state = dict(list(module.state_dict().items())[1:])
    write_checkpoint({"state_dict": state, "hyper_parameters": dict(module.hparams)}, tmp_path / "part")
    with pytest.raises(UserError, match="lacks 1 of the policy's weights"):
        export(tmp_path / "part", tmp_path / "out")


def test_a_checkpoint_cannot_ask_for_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def recording(config: PolicyConfig) -> nn.Module:
        seen.append(config.trust_remote_code)
        return load_policy(config)

    monkeypatch.setattr(export_module, "load_policy", recording)
    folder = checkpoint(trained(PolicyConfig(trust_remote_code=True)), tmp_path / "ckpt")
    export(folder, tmp_path / "a")
    export(folder, tmp_path / "b", trust_remote_code=True)
    assert seen == [False, True]


def test_heads_beside_the_policy_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = trained(PolicyConfig())
    state = module.state_dict() | {"heads.weight": torch.zeros(1, 96)}
    write_checkpoint({"state_dict": state, "hyper_parameters": dict(module.hparams)}, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "out")
    assert "left out of the export, which holds the policy alone: heads.weight" in caplog.text
    assert load_tokenizer(PolicyConfig(name=str(tmp_path / "out"))).eos_token == "<|im_end|>"


def test_last_is_the_newest_run_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run below"):
        main(["last", "out"])
    for name, started in (("old", 1.0), ("new", 2.0), ("empty", 3.0)):
        folder = run_folder(Path(), "any", name)
        write_record(folder, {"started": started, "model": "modules.SFT", "run_name": f"my {name}"})
        if name != "empty":
            module = trained(PolicyConfig(name="tiny", init_seed=int(started)))
            checkpoint(module, folder / "checkpoints" / "step=1.ckpt")
    assert main(["last", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "last is runs/any/new/checkpoints/step=1.ckpt, of run new modules.SFT 'my new'",
        "newer runs without a last checkpoint: empty modules.SFT 'my empty'",
    ]
    expected = logits(trained(PolicyConfig(name="tiny", init_seed=2)).policy)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained("out")), expected)
    assert main(["last", "old", "--run_name", "my old", "--model", "SFT"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("step=1.ckpt, of run old modules.SFT 'my old'")
    with pytest.raises(UserError, match=r"no run with model modules\.DPO below runs has a last checkpoint"):
        main(["last", "other", "--model", "modules.DPO"])
    with pytest.raises(UserError, match="--run_name chooses among runs, and 'runs/any' is one checkpoint"):
        main(["runs/any", "other", "--run_name", "x"])
