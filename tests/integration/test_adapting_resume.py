"""What moves values while a run trains, each by itself and all together, on every kind of module: from every place the
resumed run is bit for bit the one that went on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from alignment.checkpoint import SafeCheckpointIO
from alignment.component_clip import ComponentClipConfig
from alignment.domains import DomainConfig
from alignment.reference_sync import PREFIX, ReferenceSync
from alignment.tiny import tiny_tokenizer
from callbacks import (
    BatchBeta,
    FocusReward,
    FusionStability,
    GradientNormRatio,
    PlateauBeta,
    RegressionGuard,
    Stages,
    StalledHead,
    TargetKL,
)
from datamodules import PreferenceData, PromptData
from modules import DPO, GDPO, GRPO, DecoupledPO, GeneralizedRPO
from tests.callback_toys import Leave
from tests.rl_toys import online
from tests.toys import OPTIM, TINY, trainer
from tests.unit.test_decoupled_po import REWARDS
from tests.unit.test_planned import SMALL, rows

KL = {"coefficient": 0.1}
STRATA = {"by": "column", "column": "source", "ratio": {"chat": 7, "code": 2, "math": 1}}


def stages(value: str, **more: Any) -> Stages:
    """A warm start, a ramp until a condition or a step, and a curriculum to the end of the run."""
    condition = {"monitor": "val/loss" if value == "beta" else "val/reward", "plateau": 2}
    return Stages(
        {
            "warm": {"steps": 2, "values": {value: "x0.5", "optim.lr": "x2"}},
            "strong": {"steps": 5, "until": condition, "values": {value: {"end": 0.2, "over": 4}, "optim.lr": "x1"}},
            "fine": {"values": {value: "x2", "data.fraction": {"start": 0.3, "end": 1.0}}, **more},
        },
        confidence="model" if value == "beta" else "sure",
    )


def offline() -> Any:
    return DPO(policy=TINY, optim=OPTIM, beta=0.1, reference="copy")


def generalized() -> Any:
    """Every part that moves: a reference that follows each step, domains that are weighed anew, clips of components."""
    return GeneralizedRPO(
        policy=TINY,
        optim=OPTIM,
        beta=0.1,
        reference="copy",
        reference_sync=ReferenceSync(alpha=0.25, every=1),
        component_clip=ComponentClipConfig(ratio=0.5, at="states"),
        domains=DomainConfig(column="source", beta={"math": 0.3}, adaptive=True, step_size=0.5),
    )


def weighed_stages() -> Stages:
    """The weights of both terms and beta: a warm start, a ramp, then what it has come to."""
    weights = {"lambda_entropy": {"end": "x1"}, "lambda_smooth": {"end": 0.05}}
    return Stages(
        {
            "warm": {"steps": 2, "values": {"beta": 0.05, "lambda_entropy": "x5"}},
            "strong": {"steps": 4, "values": {"beta": {"end": 0.2}, **weights}},
            "fine": {},
        }
    )


def pairs(folder: Path) -> Any:
    return PreferenceData(rows(folder, 12), val_path=rows(folder, 4, first=50), tokenizer=tiny_tokenizer(), **SMALL)


def asked(folder: Path) -> Any:
    path = rows(folder, 12, "prompts", sure=lambda i: i % 5)
    other = rows(folder, 2, "prompts", first=51, sure=lambda i: i % 5)
    return PromptData(path, val_path=other, strata=STRATA, tokenizer=tiny_tokenizer(), **SMALL)


MIX = {"mix": {"chat": {"end": 1}, "math": {"end": 7}}}
SAMPLED: dict[str, Callable[[], Sequence[L.Callback]]] = {
    "stages": lambda: [stages("kl.coefficient", **MIX)],
    "plateau": lambda: [PlateauBeta(patience=1, min_delta=9.0)],
    "target": lambda: [TargetKL(1e-3, horizon=20, ema=0.5)],
    "all": lambda: [
        PlateauBeta(patience=1, min_delta=9.0, every="check"),
        stages("kl.coefficient", **MIX),
        TargetKL(1e-3, horizon=20),
        RegressionGuard(evaluations=1, share=0.999),
    ],
}
PAIRED: dict[str, Callable[[], Sequence[L.Callback]]] = {
    "stages": lambda: [stages("beta")],
    "plateau": lambda: [PlateauBeta(patience=1, min_delta=9.0)],
    "batch": lambda: [BatchBeta()],
    "target": lambda: [TargetKL(1e-3, horizon=20, ema=0.5)],
    "all": lambda: [
        TargetKL(1e-3, horizon=20),
        BatchBeta(),
        PlateauBeta(patience=1, min_delta=9.0, every="check"),
        stages("beta"),
    ],
}
HEADS = {
    "all": lambda: [
        *SAMPLED["all"](),
        GradientNormRatio(of="heads", control=True),
        StalledHead(steps=1, threshold=1e3),
        FusionStability(limit=1e-6, cooldown=1),
        FocusReward(evaluations=1, steps=2, share=1.0),
    ],
}
TERMS: dict[str, Callable[[], Sequence[L.Callback]]] = {
    "all": lambda: [PlateauBeta(patience=1, min_delta=9.0, every="check"), weighed_stages()],
}
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Path], Any], Any]] = {
    "DPO": (offline, pairs, PAIRED),
    "GeneralizedRPO": (generalized, pairs, TERMS),
    "GRPO": (lambda: online(GRPO, kl=KL, completions=2, minibatches=2), asked, SAMPLED),
    "GDPO": (lambda: online(GDPO, kl=KL, completions=2, rewards=REWARDS), asked, SAMPLED),
    "DecoupledPO": (lambda: online(DecoupledPO, kl=KL, completions=2, rewards=REWARDS), asked, SAMPLED | HEADS),
}
CASES = [(kind, name) for kind, (_, _, sets) in KINDS.items() for name in sets]


class Noted(L.Callback):
    """Which rows each batch held, and the values in force."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((batch.group_index.tolist(), module.schedulables.in_force()))


def ran(kind: str, callbacks: Sequence[L.Callback], folder: Path, start: Path | None = None) -> tuple[Any, Any, Any]:
    """(weights, those of a reference that follows too; rates; what each batch was) of five epochs of two batches, each
    with a validation after it."""
    module, data, _ = KINDS[kind]
    own, noted = module(), Noted()
    settings = {"plugins": [SafeCheckpointIO()], "val_check_interval": 1, "num_sanity_val_steps": 0, "max_epochs": 5}
    run = trainer(folder, callbacks=[*callbacks, noted], limit_val_batches=1, **settings)
    run.fit(own, datamodule=data(folder), ckpt_path=None if start is None else str(start))
    rates = [(group["name"], group["lr"]) for group in run.optimizers[0].param_groups]
    return {name: value.flatten().tolist() for name, value in own.state_dict().items()}, rates, noted.rows


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_resume(kind: str, name: str, tmp_path: Path) -> None:
    callbacks = KINDS[kind][2][name]
    whole = ran(kind, callbacks(), tmp_path)
    plain = ran(kind, [], tmp_path)
    assert whole[0] != plain[0]  # it did act
    for after in (3, 4, 7):
        saved = tmp_path / f"{after}.ckpt"
        ran(kind, [*callbacks(), Leave(after, saved)], tmp_path)
        found, rates, batches = ran(kind, callbacks(), tmp_path, saved)
        assert batches == whole[2][after:], after
        assert (found, rates) == whole[:2], after


def test_stages_and_plateau_on_generalized_rpo(tmp_path: Path) -> None:
    """By hand: the ramps run from batch 2 to 6, and each validation but the first multiplies beta by 0.8."""
    held, _, batches = ran("GeneralizedRPO", TERMS["all"](), tmp_path)
    assert any(name.startswith(PREFIX) for name in held)
    found = [values for _, values in batches]
    done = [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    falls = [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    expected = [(0.05 + 0.15 * share) * 0.8**times for share, times in zip(done, falls, strict=True)]
    assert [values["beta"] for values in found] == pytest.approx(expected)
    assert [values["lambda_entropy"] for values in found] == pytest.approx([0.05 - 0.04 * share for share in done])
    assert [values["lambda_smooth"] for values in found] == pytest.approx([0.01 + 0.04 * share for share in done])
