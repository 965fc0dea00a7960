"""What docs/fp8.md shows works as shown, and the fragments behind it run."""

from __future__ import annotations

import json
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from lightning.fabric.plugins.precision import transformer_engine
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from transformers import AutoModelForCausalLM

from alignment.checkpoint import checkpoint_of
from alignment.checkpoint_folder import load_checkpoint_folder
from alignment.cli import main
from alignment.errors import UserError
from alignment.fp8 import LOGP_BOUND
from modules import SFT
from tests.architectures import DENSE, MIXTURES, PLAIN_ONLY
from tests.integration.test_docs import REPOSITORY, SMALL, blocks, commands, folder, run
from tests.toys import TINY

__all__ = ["folder"]
PAGE = (REPOSITORY / "docs" / "fp8.md").read_text(encoding="utf-8")
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def test_commands_in_the_order_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    lines = [line for line in commands("fp8.md") if "transformer_engine" not in line]
    assert len(lines) == 4
    for line in lines:
        run(f"{line} --trainer.log_every_n_steps 1" if line.startswith("alignment fit") else line)
        if line.startswith("alignment export"):
            AutoModelForCausalLM.from_pretrained("models/start")
            (code,) = blocks("fp8.md", "python")
            name = re.match(r"# (\w+\.py)\n", code)
            assert name is not None
            (run_folder,) = {file.parents[2] for file in folder.glob("runs/*/*/checkpoints/*/manifest.json")}
            Path(name[1]).write_text(code.replace("RUN", str(run_folder)))
            runpy.run_path(name[1])
            assert "('start', 'now') False" in capsys.readouterr().out
    logged = "".join(file.read_text() for file in folder.rglob("metrics.jsonl"))
    assert all(f'"fp8/{name}"' in logged for name in ("archive_bytes", "archived", "logp_error"))


def test_the_bound_of_the_page() -> None:
    assert f"at most {LOGP_BOUND['mean']} nats on average and {LOGP_BOUND['largest']} nats at one token" in " ".join(
        PAGE.split()
    )
    assert f"the {len({**DENSE, **MIXTURES, **PLAIN_ONLY})} architectures" in PAGE


@pytest.mark.parametrize("name", ["fp8_archive", "fp8_training"])
def test_the_fragments_join_the_run(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "-c", "configs/sft.yaml", "-c", f"configs/callbacks/{name}.yaml", "--print_config"]
    assert main(words) == 0
    callbacks = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    own = yaml.safe_load(Path(f"configs/callbacks/{name}.yaml").read_text())["trainer"]["callbacks+"]
    assert [c["class_path"] for c in callbacks][-1] == own[0]["class_path"]
    assert len(callbacks) == 4
    assert own[0]["init_args"].items() <= callbacks[-1]["init_args"].items()


ENGINE = ["--trainer", "configs/trainer/transformer_engine.yaml"]


def test_transformer_engine_parses_and_says_what_it_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in commands("fp8.md") if "transformer_engine" in line]
    words = line.split()[1:]
    assert main([*words, "--print_config"]) == 0
    assert "class_path: alignment.transformer_engine.TransformerEngine" in capsys.readouterr().out
    assert main([*words, *SMALL, *QUIET]) == 2
    error = capsys.readouterr().err.strip()
    assert "pip install 'transformer-engine[pytorch]'" in error
    assert "\n" not in error


class _Linear(nn.Module):
    """As strict as TransformerEngine's: no `nn.Linear`, sizes and numbers of tokens in multiples, a pickle as state."""

    def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        layer = nn.Linear(inputs, outputs, bias=bias, dtype=params_dtype, device=device)
        self.weight, self.bias = layer.weight, layer.bias

    def get_extra_state(self) -> bytes:
        return b"pickle"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[:-1].numel() % 8 == 0
        assert x.shape[-1] % 16 == 0
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library with nothing of it but its linear layer's form."""
    engine, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipe = ModuleType("transformer_engine.common"), ModuleType("transformer_engine.common.recipe")
    pytorch.Linear, pytorch.fp8_autocast = _Linear, lambda **settings: nullcontext()  # type: ignore[attr-defined]
    recipe.DelayedScaling = recipe.Float8CurrentScaling = type("Recipe", (), {})  # type: ignore[attr-defined]
    engine.pytorch, engine.common, common.recipe = pytorch, common, recipe  # type: ignore[attr-defined]
    for module in (engine, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(transformer_engine, "_TRANSFORMER_ENGINE_AVAILABLE", True)


def trained(folder: Path, *words: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights of the checkpoint and losses of a run of two steps."""
    words = ("-c", "configs/sft.yaml", *words, *SMALL, *QUIET[:1], *QUIET[2:], "--trainer.max_steps=2")
    assert main(["fit", *words, "--trainer.log_every_n_steps=1", f"--trainer.logger.run_name={folder.name}"]) == 0
    newest = max(Path("runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    rows = [json.loads(line) for line in next(newest.rglob("metrics.jsonl")).read_text().splitlines()]
    state = load_checkpoint_folder(checkpoint_of(newest))["state_dict"]
    return state, [row["loss"] for row in rows if "loss" in row]


def test_transformer_engine_with_a_stand_in_for_its_layers(folder: Path, stand_in: None) -> None:
    """Without its rounding a run is the run without it: its layers are the policy's before anything reads the policy,
    embeddings stay tied, tokens are padded, and a checkpoint holds the ordinary weights."""
    with_it = trained(folder / "a", *ENGINE)
    without = trained(folder / "b")
    assert with_it[1] == pytest.approx(without[1], abs=1e-5)
    assert with_it[0].keys() == without[0].keys()
    for name, weight in without[0].items():
        torch.testing.assert_close(with_it[0][name], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.policy.lora.r=4", "does not go with policy.lora"),
        ("--model.policy.lora.r=4 --model.policy.quantization=4bit", "quantise and float8 do not go together"),
    ],
)
def test_what_transformer_engine_does_not_go_with(
    words: str, message: str, folder: Path, stand_in: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "-c", "configs/sft.yaml", *ENGINE, *words.split(), *SMALL, *QUIET]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_lightnings_own_is_refused() -> None:
    module = SFT(policy=TINY)
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=SingleDeviceStrategy(), precision="transformer-engine", precision_plugin=None
    )
    with pytest.raises(UserError, match=r"trainer\.precision transformer-engine is not supported.*docs/fp8\.md"):
        module.setup("fit")
