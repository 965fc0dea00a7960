"""callbacks.Fp8PolicyArchive and callbacks.Fp8Training in runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.export import export
from alignment.export_command import main as export_command
from alignment.fp8 import LOGP_BOUND, Fp8Archive, quantise
from alignment.logprobs import LogProbEngine
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from callbacks import Fp8PolicyArchive, Fp8Training
from modules import DPO, SFT
from tests.callback_toys import Leave, weights
from tests.loops import Recorder, Rows
from tests.loops import fit as fit_recorder
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

BATCH = GroupBatch.from_groups(groups(6, 2))


def run(
    module: L.LightningModule,
    folder: Path,
    callbacks: Sequence[L.Callback],
    batches: int = 6,
    ckpt_path: Any = None,
    **settings: Any,
) -> L.Trainer:
    """One batch an epoch: it is resumed between two of them."""
    settings = {"plugins": [SafeCheckpointIO()], "max_epochs": batches, "limit_val_batches": 0, **settings}
    made = trainer(folder, callbacks=list(callbacks), **settings)
    data = FixedData(groups(8, 2 if isinstance(module, DPO) else 1))
    made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return made


def sft(policy: PolicyConfig = TINY) -> SFT:
    return SFT(policy=policy, optim=OPTIM)


class Watch(L.Callback):
    """The policy's weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.after[trainer.global_step] = {n: p.detach().clone() for n, p in module.named_parameters()}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.on_train_start(trainer, module)


# ---------------------------------------------------------------------- past policies


class Damage(L.Callback):
    """Puts NaN into a weight after the third step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 3:
            next(module.parameters()).data.view(-1)[0] = torch.nan


def test_weights_without_codes_do_not_end_the_run(tmp_path: Path) -> None:
    kept = Fp8PolicyArchive(every_n_steps=1)
    with pytest.warns(UserWarning, match="step-3 is not archived: .* not finite"):
        run(sft(), tmp_path, [Damage(), kept], batches=3)
    assert kept.archive.names == ("start", "step-1", "step-2")


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["whole", "lora"])
def test_it_keeps_the_start_and_the_last_ones_and_changes_nothing(lora: LoRAConfig | None, tmp_path: Path) -> None:
    kept, watch, rows = Fp8PolicyArchive(every_n_steps=2, keep=2), Watch(), Rows()
    module, without = sft(PolicyConfig(lora=lora)), sft(PolicyConfig(lora=lora))
    run(module, tmp_path / "a", [watch, kept], logger=rows)
    run(without, tmp_path / "b", [])
    assert weights(module) == weights(without)
    assert kept.archive.names == ("start", "step-4", "step-6")
    for name, step in (("start", 0), ("step-4", 4), ("step-6", 6)):
        found = dict(kept.archive.tensors(name))
        assert found.keys() == {n for n, p in module.named_parameters() if p.requires_grad}
        for key, value in found.items():
            then = watch.after[step][key]
            assert torch.equal(value, quantise(then).dequantise() if then.dim() > 1 else then)
    logged = [dict(row) for _, row in rows.rows]
    assert [row["fp8/archived"] for row in logged if "fp8/archived" in row] == [1, 2, 2, 3, 3, 3]
    assert logged[-1]["fp8/archive_bytes"] == kept.archive.nbytes()
    errors = [row["fp8/logp_error"] for row in logged if "fp8/logp_error" in row]
    assert len(errors) == 6
    # New adapters, B = 0, have codes without an error; the trained ones do not.
    assert (errors[0] == 0) == (lora is not None)
    assert all(0 < error <= LOGP_BOUND["mean"] for error in errors[1:])


def test_steps_that_a_batch_jumps_over(tmp_path: Path) -> None:
    """Two updates a batch, every third step: at the first batch's end at or past 3, 6, 9, 12."""
    kept = Fp8PolicyArchive(every_n_steps=3, keep=9, start=False)
    fit_recorder(tmp_path, [kept], module=Recorder(updates=2), max_epochs=1)
    assert kept.archive.names == ("step-4", "step-6", "step-10", "step-12")


def test_any_lightning_module_can_be_rolled_back(tmp_path: Path) -> None:
    kept, module = Fp8PolicyArchive(every_n_steps=2), Recorder()
    fit_recorder(tmp_path, [kept], module=module, max_epochs=1)
    kept.archive.restore(module, "start")
    start = Recorder()
    assert torch.equal(module.layer.weight, quantise(start.layer.weight).dequantise())
    assert torch.equal(module.layer.bias, start.layer.bias)


def state(kept: Fp8PolicyArchive) -> Any:
    return {
        name: {key: value.tolist() for key, value in kept.archive.tensors(name)} for name in kept.archive.names
    }, kept.state_dict()["last"]


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_resumed_run_has_the_same_archive(after: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every_n_steps": 2, "keep": 2, "place": "device"}
    whole, saved = Fp8PolicyArchive(**settings), tmp_path / "here.ckpt"
    module = sft()
    run(module, tmp_path, [whole])
    run(sft(), tmp_path, [Fp8PolicyArchive(**settings), Leave(after, saved)])
    resumed, again = Fp8PolicyArchive(**settings), sft()
    run(again, tmp_path, [resumed], ckpt_path=str(saved))
    assert state(resumed) == state(whole)
    assert weights(again) == weights(module)


def test_what_a_checkpoint_kept_is_evaluated_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Fp8PolicyArchive(every_n_steps=2)
    module = DPO(policy=TINY, optim=OPTIM, reference="copy")
    made = run(module, tmp_path, [kept], batches=4)
    path = tmp_path / "c.ckpt"
    made.save_checkpoint(path)
    archive, loaded = Fp8Archive.from_checkpoint(path), DPO.load_from_checkpoint(path)
    with archive.evaluating(loaded, "step-2"):
        expected = loaded.engine(BATCH).logps
    assert export_command([str(path), str(tmp_path / "out"), "--archived", "step-2"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(LogProbEngine(model.eval())(BATCH).logps, expected, atol=1e-5, rtol=0)
    for name, message in (("step-3", "no archived policy 'step-3'; there are: start, step-2, step-4"),):
        with pytest.raises(UserError, match=message):
            export(path, tmp_path / "other", archived=name)
    with pytest.raises(UserError, match="restore one, then export"):
        export(module, tmp_path / "other", archived="step-2")
    run(sft(), tmp_path, [], batches=1).save_checkpoint(tmp_path / "without.ckpt")
    with pytest.raises(UserError, match=r"no archived policies; train with callbacks\.Fp8PolicyArchive"):
        Fp8Archive.from_checkpoint(tmp_path / "without.ckpt")


def test_an_archived_adapter_is_exported_merged(tmp_path: Path) -> None:
    module, kept = sft(PolicyConfig(lora=LoRAConfig(r=4))), Fp8PolicyArchive(every_n_steps=2)
    run(module, tmp_path, [kept], batches=4).save_checkpoint(tmp_path / "c.ckpt")
    with kept.archive.evaluating(module, "step-2"):
        expected = module.engine(BATCH).logps
    export(tmp_path / "c.ckpt", tmp_path / "out", archived="step-2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(LogProbEngine(model.eval())(BATCH).logps, expected, atol=1e-4, rtol=0)


def test_settings_of_the_archive_that_are_wrong() -> None:
    with pytest.raises(UserError, match="every_n_steps is 0; it is at least 1"):
        Fp8PolicyArchive(every_n_steps=0)
    with pytest.raises(UserError, match="keep is 0"):
        Fp8PolicyArchive(keep=0)


# ---------------------------------------------------------------------- products in FP8


def float8_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_training_in_fp8_is_near_training_without(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    ends: list[Any] = []
    for extra in ([Fp8Training(recipe=recipe)], []):
        module = SFT(policy=TINY, optim=OptimConfig(lr=3e-3, schedule="constant"))
        rows = Rows()
        run(module, tmp_path / str(len(extra)), extra, batches=8, logger=rows)
        ends.append((module, [dict(row)["loss"] for _, row in rows.rows if "loss" in dict(row)]))
    (coded, losses), (plain, others) = ends
    names = float8_layers(coded.policy)
    assert len(names) == 2 * 7  # every projection of both layers, and not the LM head
    assert not any("lm_head" in name for name in names)
    assert coded.engine.path == "shared"
    assert losses != others
    assert losses == pytest.approx(others, abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert coded.state_dict().keys() == plain.state_dict().keys()
    assert all(value.dtype == torch.float32 for value in coded.state_dict().values())


def test_the_emulated_product_is_that_of_the_codes() -> None:
    """One scale a tensor: x' W'^T with both de-quantised."""
    pytest.importorskip("torchao")
    from alignment.float8 import to_float8

    model = load_policy(TINY)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    expected = quantise(x).dequantise() @ quantise(layer.weight).dequantise().T
    to_float8(model, "tensorwise", (), emulate=True)
    found = model.model.layers[0].mlp.up_proj(x)
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - nn.functional.linear(x, layer.weight)).abs().max() > 1e-3


def test_rowwise_log_probs_do_not_depend_on_the_rest_of_the_batch() -> None:
    pytest.importorskip("torchao")
    from alignment.float8 import has_float8, to_float8

    model = to_float8(load_policy(TINY), "rowwise", (), emulate=True)
    assert has_float8(model)
    engine = LogProbEngine(model)
    with torch.no_grad():
        whole = engine(BATCH).logps
        parts = torch.cat([engine(GroupBatch.from_groups([group])).logps for group in groups(6, 2)])
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["whole", "lora"])
def test_dpo_in_fp8_starts_at_ln_2(lora: LoRAConfig | None, tmp_path: Path) -> None:
    """A copy computes as the policy does; adapters stay as they are."""
    pytest.importorskip("torchao")
    module = DPO(policy=PolicyConfig(lora=lora), optim=OPTIM, reference="auto" if lora else "copy")
    rows = Rows()
    run(module, tmp_path, [Fp8Training()], batches=3, logger=rows)
    losses = [dict(row)["loss"] for _, row in rows.rows if "loss" in dict(row)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] != losses[0]
    names = float8_layers(module.policy)
    assert len(names) == 2 * 7
    assert not any("lora_" in name for name in names)


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    module = sft()
    run(module, tmp_path, [Fp8Training(skip=["mlp", "o_proj"])], batches=1)
    assert {name.split(".")[-1] for name in float8_layers(module.policy)} == {"q_proj", "k_proj", "v_proj"}


def test_a_second_fit_and_an_evaluation_alone(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    module, callback = sft(), Fp8Training()
    run(module, tmp_path, [callback], batches=1)
    run(module, tmp_path, [callback], batches=1)
    alone = sft()
    made = trainer(tmp_path, callbacks=[Fp8Training()])
    made.validate(alone, datamodule=FixedData(groups(4, 1)), verbose=False)
    assert not float8_layers(alone.policy)


ODD = PolicyConfig(
    arch={
        "model_type": "llama",
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (
            ODD,
            {},
            r"of 16, and model\.layers\.0\.\S+ is 40 x 40 \(7 layers in all\); leave them out: skip=\[down_proj, ",
        ),
        (
            PolicyConfig(lora=LoRAConfig(r=4), quantization="4bit"),
            {},
            "needs the linear layers that policy.quantization=4bit replaces",
        ),
        (TINY, {"skip": ["self_attn", "mlp"]}, "has no linear layer to convert; leave the callback out"),
        (TINY, {"emulate": False}, "cpu has no FP8 products, and emulate is false"),
    ],
)
def test_what_cannot_be_trained_in_fp8(policy: Any, settings: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(UserError, match=message) as error:
        run(sft(policy), tmp_path, [Fp8Training(**settings)])
    assert "\n" not in str(error.value)


def test_without_torchao_and_without_our_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="for this project's modules, not for a Recorder"):
        fit_recorder(tmp_path, [Fp8Training()], module=Recorder())
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"needs torchao.*pip install 'lightning-alignment\[fp8\]'"):
        run(sft(), tmp_path, [Fp8Training()])
    with pytest.raises(UserError, match="recipe is 'blockwise'; it is rowwise or tensorwise"):
        Fp8Training(recipe="blockwise")  # type: ignore[arg-type]
