"""Loading: every kind of source, what is refused, and what a loaded policy promises."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.logprobs import LogProbEngine
from alignment.policy import (
    LoRAConfig,
    PolicyConfig,
    base_model,
    check_vocabulary,
    load_policy,
    load_tokenizer,
    model_digest,
)
from alignment.tiny import save_tiny, tiny_model
from alignment.transforms import STAGES, Transforms

IDS = torch.tensor([[1, 40, 41, 42, 3]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_folder_gives_the_same_model_as_the_built_in_one(folder: Path) -> None:
    policy = load_policy(PolicyConfig(name=str(folder)))
    assert torch.equal(logits(policy), logits(tiny_model()))
    assert policy.training
    assert load_tokenizer(PolicyConfig(name=str(folder))).eos_token == "<|im_end|>"


def test_an_architecture_is_built_from_its_fields_and_from_the_seed_alone() -> None:
    arch = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    arch |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = load_policy(PolicyConfig(arch=arch))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(logits(first), logits(load_policy(PolicyConfig(arch=arch))))
    assert not torch.equal(logits(first), logits(load_policy(PolicyConfig(arch=arch, init_seed=1))))
    config = base_model(first).config
    assert (config.model_type, config.vocab_size, config.pad_token_id, config.eos_token_id) == ("qwen3", 512, 0, 3)


def _write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama with a byte vocabulary in a GGUF file; the matrices are returned as written, in fp32."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    width, vocabulary = 32, 16
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(97 + i) for i in range(vocabulary - 1)] + ["ab"])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd.weight": (vocabulary, width),
        "output.weight": (vocabulary, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        **{f"blk.0.attn_{n}.weight": (width, width) for n in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{n}.weight": (64, width) for n in ("gate", "up")},
        "blk.0.ffn_down.weight": (width, 64),
    }
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, value in values.items():
        quantised = name == "blk.0.ffn_up.weight"
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value, kind) if quantised else value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("by_folder", [False, True])
def test_a_gguf_file_is_read_and_dequantised(tmp_path: Path, by_folder: bool) -> None:
    written = _write_gguf(tmp_path / "small.gguf")
    config = PolicyConfig(name=str(tmp_path if by_folder else tmp_path / "small.gguf"))
    policy = load_policy(config)
    layer = base_model(policy).model.layers[0]
    assert torch.equal(layer.mlp.down_proj.weight, torch.from_numpy(written["blk.0.ffn_down.weight"]))
    up = torch.from_numpy(written["blk.0.ffn_up.weight"])  # Q8_0: blocks of 32 with 127 steps to their largest value
    assert (layer.mlp.up_proj.weight - up).abs().max() <= up.abs().max() / 127
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert load_tokenizer(config).eos_token_id == 1
    policy.save_pretrained(tmp_path / "saved")  # fails on a GGUF model that kept its quantised form
    reread = load_policy(PolicyConfig(name=str(tmp_path / "saved")))
    assert torch.equal(policy(IDS % 16).logits, reread(IDS % 16).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_dtype(folder: Path, dtype: str) -> None:
    expected = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16}[dtype]
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder / "half")
    policy = load_policy(PolicyConfig(name=str(folder / "half"), dtype=dtype))
    assert {p.dtype for p in policy.parameters()} == {expected}


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://example.com/model", "is a URL"),
        ("http://example.com/x.gguf", "is a URL"),
        ("/no/such/folder", "no model folder"),
        ("./missing.gguf", "no GGUF file"),
        ("a/b/c", "no model folder"),
        ("someone/never-downloaded", "cannot load the model 'someone/never-downloaded'"),
    ],
)
def test_names_that_lead_nowhere_give_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_policy(PolicyConfig(name=name))
    assert "\n" not in str(error.value)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle was executed')",))


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match=r"only pickles \(pytorch_model\.bin\).*safetensors file is needed"):
        load_policy(PolicyConfig(name=str(folder)))


def test_an_index_cannot_lead_to_a_pickle(folder: Path) -> None:
    (folder / "evil.bin").write_bytes(pickle.dumps(_Bomb()))
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names 'evil\.bin' as a shard"):
        load_policy(PolicyConfig(name=str(folder)))


def test_a_damaged_weight_file_is_one_line(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="cannot load the model"):
        load_policy(PolicyConfig(name=str(folder)))


def test_code_in_a_checkpoint_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    config["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was executed')")
    with pytest.raises(UserError, match="cannot load the model"):
        load_policy(PolicyConfig(name=str(folder)))


def test_an_adapter_folder_is_not_a_model(folder: Path, tmp_path: Path) -> None:
    load_policy(PolicyConfig(lora=LoRAConfig(r=2))).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"as policy\.lora\.pretrained"):
        load_policy(PolicyConfig(name=str(tmp_path / "adapter")))


def _load_both(setting: dict[str, object]) -> None:
    config = PolicyConfig(**setting)
    load_tokenizer(config)
    load_policy(config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quantization": "4bit"}, "set policy.lora as well"),
        ({"dtype": "float64"}, "policy.dtype is one of auto, float32, bfloat16, float16"),
        ({"arch": {"hidden_size": 8}}, "policy.arch needs model_type"),
        ({"arch": {"model_type": "llamma"}}, "architecture of type 'llamma'"),
        ({"arch": {"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 1}}, "512 tokens"),
        ({"chat_template": "no-such-file"}, "neither Jinja text nor a file"),
    ],
)
def test_settings_that_cannot_work(setting: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _load_both(setting)


def test_flash_attention_without_its_package_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("may be installed beside CUDA")
    with pytest.raises(UserError, match="cannot load"):
        load_policy(PolicyConfig(attention="flash_attention_2"))


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_a_missing_pad_token_becomes_eos_and_the_template_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    for template in ("{{ messages[0]['content'] }}!", str(tmp_path / "t.jinja")):
        tokenizer = load_tokenizer(PolicyConfig(name=str(folder), chat_template=template))
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_tokenizer_too_large_for_the_model_is_named() -> None:
    check_vocabulary(tiny_model(), load_tokenizer(PolicyConfig()))
    with pytest.raises(UserError, match="512 tokens and the model embeds 500"):
        check_vocabulary(tiny_model(vocab_size=500), load_tokenizer(PolicyConfig()))


def test_adapted_embeddings_are_counted_too() -> None:
    for targets in (["q_proj"], ["q_proj", "embed_tokens"]):
        policy = load_policy(PolicyConfig(lora=LoRAConfig(r=4, target_modules=targets)))
        tokenizer = load_tokenizer(PolicyConfig())
        check_vocabulary(policy, tokenizer)
        tokenizer.add_tokens(["one more"])
        with pytest.raises(UserError, match="513 tokens and the model embeds 512"):
            check_vocabulary(policy, tokenizer)


def test_pad_equal_to_eos_still_trains_the_embedding_of_eos() -> None:
    """transformers freezes the input embedding of config.pad_token_id; here the text itself holds that token."""
    arch = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 1, "pad_token_id": 3, "tie_word_embeddings": False}  # fmt: skip
    policy = load_policy(PolicyConfig(arch=arch))
    policy(torch.tensor([[1, 3, 40]])).logits.square().sum().backward()
    assert base_model(policy).get_input_embeddings().weight.grad[3].abs().sum() > 0


# ------------------------------------------------------------------------------------------------------------- dropout


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DROPPING = [
    {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        **dict.fromkeys(("resid_pdrop", "attn_pdrop"), 0.5),
    },
    {"model_type": "llama", "num_key_value_heads": 2, "attention_dropout": 0.5, **SMALL},
    {"model_type": "gpt_neox", "hidden_dropout": 0.5, "attention_dropout": 0.5, **SMALL},
    {"model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 32, "dropout": 0.5, "layerdrop": 0.5, **SMALL},
]


@pytest.mark.parametrize("arch", DROPPING, ids=lambda a: a["model_type"])
def test_c8_dropout_of_the_configuration_is_off_in_training_mode(arch: dict[str, object]) -> None:
    policy = load_policy(PolicyConfig(arch=arch))
    assert policy.training
    assert torch.equal(logits(policy), logits(policy))
    assert torch.equal(logits(policy), logits(policy.eval()))
    kept = load_policy(PolicyConfig(arch=arch, dropout=True))
    assert not torch.equal(logits(kept), logits(kept))


def test_dropout_of_a_pretrained_adapter_is_off_too(tmp_path: Path) -> None:
    adapter = load_policy(PolicyConfig(lora=LoRAConfig(r=2, dropout=0.5)))
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    adapter.save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path))))
    assert torch.equal(logits(policy), logits(adapter.eval()))
    assert policy.training


# ----------------------------------------------------------------------------------------------- LoRA and quantisation


def one_step(policy: nn.Module) -> list[str]:
    """Names of the parameters that one SGD step on a completion's log-probs changes."""
    batch = GroupBatch.from_groups([Group(prompt=[1, 40, 41], completions=[[42, 43, 3]])])
    engine = LogProbEngine(policy)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    (-engine(batch).logps.sum()).backward()
    torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1).step()
    return [n for n, p in policy.named_parameters() if not torch.equal(p, before[n])]


@pytest.mark.parametrize("quantization", ["none", "4bit", "8bit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_c9_adapters_train_with_and_without_gradient_checkpointing(quantization: str, checkpointing: bool) -> None:
    config = PolicyConfig(lora=LoRAConfig(r=4), quantization=quantization, gradient_checkpointing=checkpointing)
    policy = load_policy(config)
    assert isinstance(policy, PeftModel)
    assert base_model(policy).is_activation_checkpointing is checkpointing
    changed = one_step(policy)
    # B starts at zero, so the first gradient of A is zero: every B moves, nothing else does.
    assert sorted(changed) == sorted(n for n, _ in policy.named_parameters() if "lora_B" in n)


def test_gradient_checkpointing_leaves_the_gradient_as_it_is() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy(PolicyConfig(gradient_checkpointing=checkpointing))
        policy(IDS).logits.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("quantization", "error"), [("4bit", 0.5), ("8bit", 0.05)])
def test_a_quantised_base_stays_close_and_frozen(folder: Path, quantization: str, error: float) -> None:
    """Relative distance of the logits from the full model's: nf4 keeps 16 levels a weight, int8 keeps 255."""
    for name in ("tiny", str(folder)):
        policy = load_policy(PolicyConfig(name=name, lora=LoRAConfig(r=2), quantization=quantization))
        exact = logits(tiny_model())
        assert 0 < (logits(policy) - exact).norm() / exact.norm() < error
        assert {n.split(".")[-2] for n, p in policy.named_parameters() if p.requires_grad} == {"default"}
        stored = base_model(policy).model.layers[0].mlp.up_proj.base_layer.weight
        assert stored.dtype == {"4bit": torch.uint8, "8bit": torch.int8}[quantization]


def test_inference_does_not_change_a_4bit_base() -> None:
    """bitsandbytes repacks 4-bit weights in evaluation on some CPUs, with rounded scales, and keeps them that way."""
    config = PolicyConfig(lora=LoRAConfig(r=2), quantization="4bit")
    policy = load_policy(config)
    digest, training = model_digest(policy, config), logits(policy)
    assert torch.equal(logits(policy.eval()), training)
    assert model_digest(policy, config) == digest


def test_a_gguf_base_can_be_quantised(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "small.gguf")
    config = PolicyConfig(name=str(tmp_path / "small.gguf"), quantization="4bit", lora=LoRAConfig(r=2))
    assert base_model(load_policy(config)).model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8


def test_new_adapters_depend_on_init_seed_alone() -> None:
    def a(seed: int) -> torch.Tensor:
        policy = load_policy(PolicyConfig(lora=LoRAConfig(r=2), init_seed=seed))
        return torch.cat([p.flatten() for n, p in policy.named_parameters() if "lora_A" in n])

    torch.manual_seed(0)
    first = a(0)
    state = torch.get_rng_state()
    assert torch.equal(first, a(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, a(1))


def test_an_adapter_is_continued(tmp_path: Path) -> None:
    trained = load_policy(PolicyConfig(lora=LoRAConfig(r=3, alpha=7, target_modules=["q_proj"])))
    one_step(trained)
    trained.save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path))))
    assert torch.equal(logits(policy), logits(trained))
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == [
        n for n, _ in policy.named_parameters() if "lora" in n
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "Megatron"),
        (None, "not JSON"),
    ],
)
def test_strange_adapters_are_refused(tmp_path: Path, change: dict[str, object] | None, message: str) -> None:
    load_policy(PolicyConfig(lora=LoRAConfig(r=2))).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text("{" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        load_policy(PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path))))


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    load_policy(PolicyConfig(lora=LoRAConfig(r=2))).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        load_policy(PolicyConfig(lora=LoRAConfig(pretrained=str(tmp_path))))


# ---------------------------------------------------------------------------------------------------------- transforms


def test_transforms_run_in_their_fixed_order() -> None:
    seen: list[str] = []
    transforms = Transforms()
    for stage in reversed([s for s in STAGES if s != "quantise"]):
        transforms.register(stage, lambda model, stage=stage: seen.append(stage) or model)
    transforms.apply(nn.Linear(1, 1))
    assert seen == ["lora", "float8", "activation_checkpointing", "fully_shard", "compile"]


def test_callbacks_steps_come_between_the_policys_own() -> None:
    transforms, found = Transforms(), []
    transforms.register("float8", lambda m: found.append((type(m), base_model(m).is_activation_checkpointing)) or m)
    load_policy(PolicyConfig(lora=LoRAConfig(r=2), gradient_checkpointing=True), transforms)
    assert [(issubclass(kind, PeftModel), checkpointing) for kind, checkpointing in found] == [(True, False)]
    assert transforms.stages == ("float8",)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_float8_does_not_go_with_a_quantised_base(quantization: str) -> None:
    transforms = Transforms()
    transforms.register("float8", lambda model: model)
    with pytest.raises(UserError, match="do not go together"):
        load_policy(PolicyConfig(lora=LoRAConfig(), quantization=quantization), transforms)


def test_a_stage_is_taken_once_and_must_exist() -> None:
    transforms = Transforms()
    transforms.register("compile", lambda model: model)
    with pytest.raises(UserError, match="two settings ask for the model transform 'compile'"):
        transforms.register("compile", lambda model: model)
    with pytest.raises(UserError, match="unknown model transform 'prune'"):
        transforms.register("prune", lambda model: model)


# -------------------------------------------------------------------------------------------------------------- digest


def test_the_digest_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    here, there = (PolicyConfig(name=str(p)) for p in (folder, tmp_path / "elsewhere"))
    digest = model_digest(load_policy(here), here)
    assert model_digest(load_policy(there), there) == digest
    assert model_digest(load_policy(PolicyConfig(init_seed=1)), here) != digest
    half = PolicyConfig(name=str(folder), dtype="bfloat16")
    assert model_digest(load_policy(half), half) != digest
    changed = load_policy(here)
    with torch.no_grad():
        next(changed.parameters()).view(-1)[17] += 1e-3
    assert model_digest(changed, here) != digest
