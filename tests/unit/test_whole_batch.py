"""Losses that look at the whole batch, and WPO, on a real tiny Llama: micro-batches change nothing, state resumes, the
extra pass is made only where it must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.lm_head import LogitForm, log_collision
from alignment.logprobs import LogProbEngine, TokenStats
from alignment.optim import OptimConfig
from alignment.policy import load_policy
from alignment.update import UNIT
from modules import CPO, DPO, KTO, ORPO, SimPO
from tests.rl_toys import Watch, fit, moved
from tests.toys import TINY, FixedData, groups, trainer

SGD = OptimConfig(lr=1e-2, optimizer="sgd", schedule="constant", clip_norm=None)
MIX = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}


def dpo(**settings: Any) -> Callable[..., Any]:
    return lambda **more: DPO(policy=TINY, reference="copy", optim=SGD, **settings, **more)


MODULES: dict[str, Callable[..., Any]] = {
    "aot": dpo(loss="aot", label_smoothing=0.1),
    "aot_unpaired": dpo(loss="aot_unpaired"),
    "bco": dpo(loss="bco"),
    "mix": dpo(loss=MIX),
    "mix of those": dpo(loss={"aot": 1.0, "bco": 0.5, "sft": 0.1}),
    "wpo": dpo(loss=MIX, weighting="wpo"),
    "js": dpo(divergence="js", loss="ipo"),
    "kto": lambda **more: KTO(policy=TINY, optim=SGD, bad_weight=1.5, **more),
    "apo_zero": lambda **more: KTO(policy=TINY, loss="apo_zero", reference="copy", optim=SGD, **more),
    "simpo": lambda **more: SimPO(policy=TINY, optim=SGD, sft_weight=0.5, **more),
    "orpo": lambda **more: ORPO(policy=TINY, optim=SGD, **more),
    "cpo": lambda **more: CPO(policy=TINY, optim=SGD, **more),
}


def rows(count: int, seed: int = 0) -> list[Group]:
    """Pairs whose chosen completion is good, and every third one whose rejected is good as well."""
    return [replace(g, rows={"label": [1.0, float(g.index % 3 == 0)]}) for g in groups(count, 2, seed=seed)]


def run(build: Callable[..., Any], folder: Path, **settings: Any) -> Watch:
    """Three batches of 8, from a policy that is away from its reference."""
    return fit(moved(build(**settings)), folder, FixedData(rows(24), batch_size=8))[0]


@pytest.mark.parametrize("name", MODULES)
def test_micro_batches_change_nothing(name: str, tmp_path: Path) -> None:
    """Losses, metrics and gradients of three steps, each from weights that the last one moved."""
    whole, split = (run(MODULES[name], tmp_path, micro_batch_tokens=bound) for bound in (None, 24))
    assert len(whole.updates) == 3
    for a, b in zip(split.updates, whole.updates, strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=2e-6)
    for a, b in zip(split.gradients, whole.gradients, strict=True):
        assert float((a - b).norm()) <= 2e-5 * float(b.norm())
    assert whole.updates[0]["loss"] != whole.updates[1]["loss"]


@pytest.mark.parametrize("name", MODULES)
def test_evaluation_does_not_depend_on_micro_batches(name: str, tmp_path: Path) -> None:
    found = []
    for bound in (None, 24):
        module = moved(MODULES[name](micro_batch_tokens=bound))
        found.append(trainer(tmp_path).validate(module, datamodule=FixedData(rows(11)), verbose=False)[0])
        assert not getattr(module, "loss_memory", None), "evaluation is not training"
    assert found[0] == pytest.approx(found[1], rel=2e-5, abs=2e-6)
    assert math.isfinite(found[0]["val/loss"])


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_aot_is_the_loss_of_the_sorted_batch(name: str) -> None:
    """The module's gradient against sorting in one graph, without any of its machinery."""
    module = moved(MODULES[name](micro_batch_tokens=24))
    batch = GroupBatch.from_groups(rows(8))
    parameters = [p for p in module.policy.parameters() if p.requires_grad]
    told = module.whole_batch(batch)
    parts = [module.loss(micro, replace(UNIT, prompts=8.0))[0] for micro in told.split(24)]
    assert len(parts) > 2
    ours = torch.autograd.grad(sum(parts), parameters)
    policy, reference = (
        batch.pair(batch.sum_tokens(f)) for f in (module.engine(batch).logps, module.reference_logps(batch))
    )
    if name == "aot":
        gap = (policy[0] - policy[1]).sort().values - (reference[0] - reference[1]).sort().values
        loss = -0.9 * F.logsigmoid(0.1 * gap) - 0.1 * F.logsigmoid(-0.1 * gap)
    else:
        gap = (policy[0] - reference[0]).sort().values - (policy[1] - reference[1]).sort().values
        loss = -F.logsigmoid(0.1 * gap)
    assert float(sum(parts).detach()) == pytest.approx(float(loss.mean().detach()), abs=1e-6)
    for a, b in zip(ours, torch.autograd.grad(loss.mean(), parameters), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("loss", "bound", "passes"),
    [("aot", None, 1), ("aot", 10_000, 1), ("aot", 24, 2), ("bco", 24, 2), (MIX, 24, 1), ("sigmoid", 24, 1)],
)
def test_the_extra_pass_is_made_only_where_it_must_be(loss: Any, bound: int | None, passes: int) -> None:
    """Tokens scored by the policy, in units of the batch; the reference is asked once in any case."""
    module = DPO(policy=TINY, loss=loss, reference="copy", micro_batch_tokens=bound)
    module.configure_model()
    engine, seen = module.engine, []

    def counted(micro: GroupBatch, **asked: Any) -> TokenStats:
        seen.append(len(micro.completion_ids))
        return engine(micro, **asked)

    module.engine = counted  # type: ignore[assignment]
    reference, referred = module.reference.token_logps, []

    def answered(micro: GroupBatch, temperature: float = 1.0) -> Tensor:
        referred.append(len(micro.completion_ids))
        return reference(micro, temperature)

    module.reference.token_logps = answered  # type: ignore[method-assign]
    batch = GroupBatch.from_groups(rows(8))
    for micro in module.whole_batch(batch).split(bound):
        module.loss(micro, UNIT)
    assert sum(seen) == passes * len(batch.completion_ids)
    assert sum(referred) == len(batch.completion_ids)


def test_the_shift_of_bco_resumes(tmp_path: Path) -> None:
    """4 + 4 batches are 8, bit for bit: the shift is the mean of all, not of those since the checkpoint."""
    data = FixedData(rows(16), batch_size=4)

    def trained(epochs: int, **resumed: Any) -> tuple[Any, Any]:
        module = moved(DPO(policy=TINY, loss="bco", reference="copy", optim=SGD))
        t = trainer(tmp_path, max_epochs=epochs, limit_val_batches=0, plugins=[SafeCheckpointIO()])
        t.fit(module, datamodule=data, **resumed)
        return module, t

    whole, _ = trained(2)
    half, t = trained(1)
    t.save_checkpoint(tmp_path / "c")
    again, _ = trained(2, ckpt_path=tmp_path / "c")
    assert half.loss_memory["bco_batches"] == 4
    assert half.loss_memory["bco_shift"] != whole.loss_memory["bco_shift"]
    assert again.loss_memory == whole.loss_memory
    for a, b in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_pairs_without_a_scored_token_change_nothing(tmp_path: Path) -> None:
    """They are in no order, no mean and no count."""
    silent = replace(groups(1, 2, seed=9)[0], scored=None)
    silent = replace(silent, scored=[[False] * len(c) for c in silent.completions], rows={"label": [1.0, 0.0]})
    for name in ("aot", "aot_unpaired", "bco", "mix", "kto"):
        module = moved(MODULES[name](micro_batch_tokens=None))
        found = []
        for more in ([], [silent]):
            if name != "kto":
                module.loss_memory = {}
            batch = module.whole_batch(GroupBatch.from_groups([*rows(6), *more]))
            found.append(float(module.loss(batch, UNIT)[0].detach()))
        if name == "kto":  # the baseline has one mismatched pair more, of a prompt that is there
            assert found[0] == pytest.approx(found[1], rel=0.05)
        else:
            assert found[0] == pytest.approx(found[1], rel=1e-6), name


def test_a_mix_in_the_module_by_hand() -> None:
    """ln 2 and 2 ln 2 at the start, and the token mean of the chosen's NLL; each is a metric."""
    module = DPO(policy=TINY, loss=MIX, reference="copy")
    module.configure_model()
    batch = GroupBatch.from_groups(rows(5))
    share, metrics = module.loss(batch, replace(UNIT, prompts=5.0))
    logps = module.engine(batch).logps
    chosen = batch.scored & (batch.row_of() % 2 == 0)
    nll = -float(logps[chosen].mean().detach())
    assert float(share.detach()) == pytest.approx((0.8 + 0.2 * 2) * math.log(2) + nll, rel=1e-5)
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert means["loss/sigmoid"] == pytest.approx(math.log(2), abs=1e-5)
    assert means["loss/bco_pair"] == pytest.approx(2 * math.log(2), abs=1e-5)
    assert means["loss/sft"] == pytest.approx(nll, rel=1e-5)
    assert means["loss"] == pytest.approx(float(share.detach()), rel=1e-6)


def test_the_weight_of_sft() -> None:
    """Given once, and a number that is one."""
    for value in (-1.0, math.nan, math.inf):
        for kind in (DPO, SimPO):
            with pytest.raises(UserError, match=r"sft_weight is .*; it must not be negative, and finite"):
                kind(policy=TINY, sft_weight=value)
    with pytest.raises(UserError, match="the mix has sft already"):
        DPO(policy=TINY, loss=MIX, sft_weight=1.0)


def test_an_unknown_weighting() -> None:
    with pytest.raises(UserError, match="weighting 'length' is not known; use wpo"):
        DPO(policy=TINY, weighting="length")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- WPO


@pytest.mark.parametrize("tile_bytes", [8 << 20, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_collision_is_that_of_the_dense_softmax(tile_bytes: int, temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 5, generator=draw), 3 * torch.randn(700, 5, generator=draw)
    bias, form = torch.randn(700, generator=draw), LogitForm(scale=0.5, softcap=20.0)
    logits = 20 * torch.tanh(0.5 * (hidden @ weight.T + bias) / 20) / temperature
    expected = logits.double().softmax(-1).square().sum(-1).log()
    found = log_collision(hidden, weight, bias, form=form, temperature=temperature, tile_bytes=tile_bytes)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_both_paths_give_the_same_collision() -> None:
    batch = GroupBatch.from_groups(groups(5, 2))
    model = load_policy(TINY)
    shared, plain = (LogProbEngine(model, path=path)(batch, collision=True) for path in ("shared", "plain"))
    assert shared.collision is not None
    assert plain.collision is not None
    torch.testing.assert_close(shared.collision, plain.collision, atol=1e-5, rtol=1e-5)
    assert bool((shared.collision[~batch.scored] == 0).all())
    assert bool((shared.collision[batch.scored] < 0).all())
    assert not shared.collision.requires_grad


def stats(batch: GroupBatch, collision: Tensor) -> Callable[..., TokenStats]:
    logps = torch.full((len(batch.completion_ids),), -2.0)
    return lambda micro, **asked: TokenStats(logps=logps, entropy=None, hidden=None, collision=collision)


def test_wpo_weighs_pairs_but_not_sft() -> None:
    """log pi - log sum p^2 is -1 everywhere in the first pair and -2, 0 in the second: weights e^(-1 - 1), e^(-2 +
    0)."""
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5, 5], [6]]) for _ in range(2)])
    module: Any = DPO(policy=TINY, loss={"sigmoid": 1.0, "sft": 1.0}, weighting="wpo", reference="copy")
    module.engine = stats(batch, torch.tensor([-1.0, -1.0, -1.0, 0.0, 0.0, -2.0]))
    module.reference_logps = lambda micro: torch.full((len(micro.completion_ids),), -2.0)
    share, metrics = module.loss(batch, replace(UNIT, prompts=2.0))
    assert float(share) == pytest.approx(math.exp(-2) * math.log(2) + 2.0)
    assert float(metrics["wpo/weight"][0]) == pytest.approx(2 * math.exp(-2))
