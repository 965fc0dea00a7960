"""Rewarded Soups: the mixture by hand, what it can be made of, mistakes in one line."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.checkpoint import SafeCheckpointIO
from alignment.checkpoint_folder import write_checkpoint
from alignment.cli import main
from alignment.errors import UserError
from alignment.export import export
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.soup import soup
from alignment.tiny import save_tiny
from modules import SFT, DecoupledPO
from tests.rl_toys import fit, here, online

NORM = "model.norm.weight"


def with_weights(folder: Path, change: dict[str, Tensor]) -> Path:
    """The folder, with some of its tensors replaced."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **change}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "start", seed=3)


@pytest.fixture
def pair(tmp_path: Path, start: Path) -> tuple[Path, Path]:
    """Two models that differ in one vector: it begins with (1, 2) and with (-1, 4)."""
    out = []
    for name, values in (("a", (1.0, 2.0)), ("b", (-1.0, 4.0))):
        folder = shutil.copytree(start, tmp_path / name)
        vector = load_file(folder / "model.safetensors")[NORM]
        vector[:2] = torch.tensor(values)
        out.append(with_weights(folder, {NORM: vector}))
    return out[0], out[1]


def test_the_golden_mixture(pair: tuple[Path, Path], start: Path, tmp_path: Path) -> None:
    """[.3, .7] of (1, 2) and (-1, 4) is (-.4, 3.4); what is equal stays, to a rounding; the folder loads."""
    assert soup(pair, tmp_path / "out", [0.3, 0.7]) == [0.3, 0.7]
    mixed, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(start / "model.safetensors")
    assert mixed[NORM][:2].tolist() == pytest.approx([-0.4, 3.4])
    assert mixed.keys() == before.keys()
    for name in mixed.keys() - {NORM}:
        torch.testing.assert_close(mixed[name], before[name], rtol=2e-7, atol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight, mixed[NORM])
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert files == {p.name for p in start.iterdir()}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == AutoTokenizer.from_pretrained(
        start
    ).chat_template


def test_heads_of_a_run_are_not_dropped_in_silence(tmp_path: Path, start: Path) -> None:
    """Neither of an export nor of a checkpoint of DecoupledPO."""
    module = online(DecoupledPO, policy=PolicyConfig(name=str(start)), rewards={"odd": here(), "even": here()})
    _, run = fit(module, tmp_path, max_steps=1, plugins=[SafeCheckpointIO()])
    run.save_checkpoint(tmp_path / "one.ckpt")
    export(tmp_path / "one.ckpt", tmp_path / "exported")
    for source in ("one.ckpt", "exported"):
        with pytest.raises(UserError, match=f"{source}' is a policy with heads") as caught:
            soup([start, tmp_path / source], tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [0, 1])
def test_a_weight_of_one_is_the_model_itself(pair: tuple[Path, Path], tmp_path: Path, k: int) -> None:
    soup(pair, tmp_path / "out", [1.0 - k, float(k)])
    mixed, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair[k]))
    assert all(torch.equal(mixed[name], own[name]) for name in own)


def test_equal_weights_of_three(pair: tuple[Path, Path], tmp_path: Path) -> None:
    third = shutil.copytree(pair[0], tmp_path / "c")
    assert soup([*pair, third], tmp_path / "out") == pytest.approx([1 / 3] * 3)
    mixed = load_file(tmp_path / "out" / "model.safetensors")
    assert mixed[NORM][:2].tolist() == pytest.approx([1 / 3, 8 / 3])


def test_half_precision_stays(tmp_path: Path, start: Path) -> None:
    """1 and 1 + 2^-7 are neighbours in bfloat16; a tenth of the way rounds to 1."""
    folders = []
    for k, value in enumerate((1.0, 1.0 + 2**-7)):
        folder = shutil.copytree(start, tmp_path / str(k))
        tensors = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
        folders.append(with_weights(folder, {**tensors, NORM: torch.full((96,), value, dtype=torch.bfloat16)}))
    soup(folders, tmp_path / "out", [0.9, 0.1])
    mixed = load_file(tmp_path / "out" / "model.safetensors")
    assert mixed[NORM].dtype == torch.bfloat16
    assert mixed[NORM].tolist() == [1.0] * 96


def test_shards_of_different_cuts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """One model in three files, the other in one; in whichever order they are given."""
    cut = tmp_path / "cut"
    AutoModelForCausalLM.from_pretrained(pair[1]).save_pretrained(cut, max_shard_size="300KB")
    AutoTokenizer.from_pretrained(pair[1]).save_pretrained(cut)
    assert len(list(cut.glob("*.safetensors"))) > 1
    for name, sources, weights in (("x", (pair[0], cut), [0.3, 0.7]), ("y", (cut, pair[0]), [0.7, 0.3])):
        soup(sources, tmp_path / name, weights)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.model.norm.weight[:2].tolist() == pytest.approx([-0.4, 3.4])
    assert len(list((tmp_path / "y").glob("*.safetensors"))) > 1


def checkpoint(policy: PolicyConfig, folder: Path, shift: float) -> Path:
    module = SFT(policy=policy)
    module.configure_model()
    with torch.no_grad():
        for p in module.policy.parameters():
            if p.requires_grad:
                p += shift
    write_checkpoint({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, folder)
    return folder


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["all weights", "LoRA"])
def test_checkpoints_and_runs(tmp_path: Path, start: Path, lora: LoRAConfig | None) -> None:
    """They are exported first, adapters merged: the mixture of what each export would be."""
    policy = PolicyConfig(name=str(start), lora=lora)
    one = checkpoint(policy, tmp_path / "one.ckpt", 0.01)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint(policy, run / "checkpoints" / "last.ckpt", 0.03)
    soup([one, run], tmp_path / "out", [0.25, 0.75])
    export(one, tmp_path / "x")
    export(run / "checkpoints" / "last.ckpt", tmp_path / "y")
    mixed, x, y = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "x", "y"))
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, 0.25 * x[name] + 0.75 * y[name])
    assert not torch.equal(x[NORM if lora is None else "model.layers.0.mlp.up_proj.weight"], y[name])


def test_models_that_are_far_apart_are_spoken_of(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_tiny(tmp_path / "other", seed=4)
    with caplog.at_level(logging.WARNING, logger="alignment.soup"):
        soup(pair, tmp_path / "near")
        assert caplog.messages == []
        soup([pair[0], other], tmp_path / "far")
    (message,) = caplog.messages
    assert f"'{other}' is " in message
    assert f"away from '{pair[0]}': these do not look like fine-tunes of one model" in message


# ---------------------------------------------------------------------- command line


def test_the_command(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    a, b = map(str, pair)
    for words in (["--weights", "0.3,0.7", a, b, out], [a, b, "--weights=0.3,0.7", out, "--force"]):
        assert main(["soup", *words]) == 0
        assert f"{out} holds 0.3 {a} + 0.7 {b}" in capsys.readouterr().out
    assert load_file(Path(out) / "model.safetensors")[NORM][:2].tolist() == pytest.approx([-0.4, 3.4])
    assert main(["soup", a, b, out]) == 2
    assert "is not empty; choose another folder" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "alignment soup MODEL MODEL OUT --weights 0.3,0.7" in capsys.readouterr().out
    assert main(["soup", "--help"]) == 0
    assert "Rewarded Soups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("0.3", "1 weights for 2 models"),
        ("0.3,0.3", "weights 0.3, 0.3 are no mixture"),
        ("1.5,-0.5", "weights 1.5, -0.5 are no mixture"),
        ("nan,1", "weights nan, 1 are no mixture"),
        ("0.3 0.7", "--weights is '0.3 0.7'; give numbers separated by commas"),
    ],
)
def test_weights_that_are_no_mixture(
    pair: tuple[Path, Path], tmp_path: Path, weights: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["soup", *map(str, pair), str(tmp_path / "out"), "--weights", weights]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit(pair: tuple[Path, Path], start: Path, tmp_path: Path) -> None:
    def refused(other: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            soup([start, other], tmp_path / "out")
        assert not [p for p in tmp_path.iterdir() if p.name.startswith((".", "out"))]

    wide = shutil.copytree(start, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    refused(wide, r"differ in rms_norm_eps \(.* and 0.5\): mix models of one start")
    more = with_weights(shutil.copytree(start, tmp_path / "more"), {"extra": torch.ones(1)})
    refused(more, "other tensors, for example extra")
    short = with_weights(shutil.copytree(start, tmp_path / "short"), {NORM: torch.ones(3)})
    refused(short, r"differ in the shape of model.norm.weight, \(96,\) and \(3,\)")
    damaged = shutil.copytree(start, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 20)
    refused(damaged, "is damaged")
    words = shutil.copytree(start, tmp_path / "words")
    tokenizer = AutoTokenizer.from_pretrained(words)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(words)
    refused(words, "have different vocabularies")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "adapter", "holds an adapter, .* export it merged")
    headed = shutil.copytree(start, tmp_path / "headed")
    (headed / "heads").mkdir()
    refused(headed, "'.*headed' is a policy with heads, which a soup would leave out")
    refused(tmp_path / "nothing", "is neither an exported model, nor a checkpoint, nor a run's folder")


def test_one_model_is_no_soup(start: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two models, got 1"):
        soup([start], tmp_path / "out")
