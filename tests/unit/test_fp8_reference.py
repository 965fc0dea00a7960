"""reference=fp8: the policy's start as codes, for the policy itself to run with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.fp8 import LOGP_BOUND, Fp8Archive
from alignment.logprobs import LogProbEngine
from alignment.memory import Plan, estimate
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig, load_policy
from alignment.reference import Reference
from alignment.tiny import tiny_model
from modules.dpo import DPO
from modules.grpo import GRPO
from tests.rl_toys import fit, online
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

BATCH = GroupBatch.from_groups(groups(6, 2))


def moved(policy: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def test_it_is_the_start_within_the_bound_and_stays_when_the_policy_moves() -> None:
    policy = load_policy(TINY)
    engine = LogProbEngine(policy)
    with torch.no_grad():
        start = engine(BATCH, entropy=True)
    reference = Reference.build("fp8", policy, TINY, LogProbEngine)
    assert reference.kind == "fp8"
    found = reference.token_logps(BATCH)
    assert found.grad_fn is None
    gaps = (found - start.logps).abs()[BATCH.scored]
    assert 0 < gaps.mean() <= LOGP_BOUND["mean"]
    assert gaps.max() <= LOGP_BOUND["largest"]
    moved(policy)
    assert (engine(BATCH).logps - start.logps).abs().mean() > 0.5
    logps, entropy = reference.token_stats(BATCH)
    assert torch.equal(logps, found)
    assert torch.equal(reference.token_logps(BATCH), found)
    assert (entropy - start.entropy).abs().max() <= LOGP_BOUND["largest"]
    assert policy.training
    assert all(p.requires_grad for p in policy.parameters())


def test_states_and_head_are_those_of_the_codes() -> None:
    policy = load_policy(TINY)
    archive, twin = Fp8Archive(), tiny_model()
    archive.store("a", policy)
    archive.restore(twin, "a")
    reference = Reference.build("fp8", policy, TINY, LogProbEngine)
    moved(policy)
    states, head = reference.states(BATCH)
    with torch.no_grad():
        expected = LogProbEngine(twin.eval())(BATCH, hidden="before").hidden
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(head.weight, twin.lm_head.weight.detach())
    assert not torch.equal(head.weight, policy.lm_head.weight.detach())


def test_a_temperature() -> None:
    policy = load_policy(TINY)
    reference = Reference.build("fp8", policy, TINY, LogProbEngine)
    archive, twin = Fp8Archive(), tiny_model()
    archive.store("a", policy)
    archive.restore(twin, "a")
    with torch.no_grad():
        expected = LogProbEngine(twin.eval())(BATCH, temperature=0.5).logps
    torch.testing.assert_close(reference.token_logps(BATCH, 0.5), expected, atol=1e-5, rtol=0)


def losses(reference: str, folder: Path) -> tuple[list[float], DPO]:
    module = DPO(policy=TINY, reference=reference, optim=OptimConfig(lr=1e-4, schedule="constant"))
    run = trainer(folder, max_epochs=1, limit_val_batches=0)
    found: list[float] = []
    note = module.note_update

    def noted(**values: Any) -> None:
        found.append(values["loss"])
        note(**values)

    module.note_update = noted  # type: ignore[method-assign]
    run.fit(module, datamodule=FixedData(groups(24, 2)))
    return found, module


def test_dpo_starts_near_ln_2_and_trains_as_with_a_copy(tmp_path: Path) -> None:
    """The first loss is that of the log-ratios which the error of the codes makes, and not quite ln 2."""
    coded, module = losses("fp8", tmp_path / "a")
    copied, _ = losses("copy", tmp_path / "b")
    assert module.reference.kind == "fp8"
    policy, twin, archive = tiny_model(), tiny_model(), Fp8Archive()
    archive.store("a", policy)
    archive.restore(twin, "a")
    batch = GroupBatch.from_groups(groups(24, 2)[:8])
    with torch.no_grad():
        errors = LogProbEngine(policy)(batch).logps - LogProbEngine(twin)(batch).logps
    chosen, rejected = batch.pair(batch.sum_tokens(errors))
    first = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean().item()
    assert copied[0] == pytest.approx(math.log(2), abs=1e-6)
    assert coded[0] == pytest.approx(first, abs=1e-5)
    assert 1e-6 < abs(first - math.log(2)) < 0.02
    assert coded == pytest.approx(copied, abs=0.02)


def test_no_importance_ratio_is_taken_with_codes(tmp_path: Path) -> None:
    """A KL that is measured but not in the loss: each gradient of two updates a rollout is to the bit that of a run
    with an exact reference, so nothing of the codes is in ratios."""
    gradients: list[list[Tensor]] = []
    kls: list[float] = []
    for reference in ("fp8", "copy"):
        module = online(GRPO, minibatches=2, kl={"measure": True}, reference=reference)
        watch, _ = fit(module, tmp_path)
        assert module.reference.kind == reference
        gradients.append(watch.gradients)
        kls.append(watch.updates[0]["kl"])
    assert kls[1] == pytest.approx(0, abs=1e-6)
    assert abs(kls[0]) > 1e-6
    assert len(gradients[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": PolicyConfig(lora=LoRAConfig(r=4))}, "reference=fp8 codes a whole model; with policy.lora"),
        ({"reference_sync": {"every": 2}}, "reference=fp8 is codes of the start, which cannot follow the policy"),
    ],
)
def test_where_it_makes_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        DPO(**{"policy": TINY, "reference": "fp8", "optim": OPTIM, **settings}).configure_model()
    assert "\n" not in str(error.value)


def test_the_estimate_of_its_memory() -> None:
    """A byte a weight, 4 a matrix, vectors as they are; de-quantised: embeddings, last norm and one of two layers."""
    model = tiny_model()
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    outside = model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    archive = Fp8Archive()
    archive.store("a", model)
    assert estimate(Plan(policy=TINY, reference="fp8")).reference == archive.nbytes() + outside + layer


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["whole", "lora"])
def test_a_reference_is_reset_to_an_archived_policy(lora: LoRAConfig | None, tmp_path: Path) -> None:
    module = DPO(policy=PolicyConfig(lora=lora), optim=OPTIM, reference_sync={"every": 1000})
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, datamodule=FixedData(groups(16, 2)))
    archive = Fp8Archive()
    archive.store("a", module)
    with archive.evaluating(module, "a"):
        expected = module.engine(BATCH).logps
    before = module.reference.token_logps(BATCH)
    module.reset_reference(archive, "a")
    found = module.reference.token_logps(BATCH)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.equal(found, before)
    saved = {name for name in module.state_dict() if name.startswith("reference.")}
    assert saved, "a checkpoint holds it"
    still = DPO(policy=TINY, reference="copy", optim=OPTIM)
    still.configure_model()
    with pytest.raises(UserError, match="in a run with reference_sync only"):
        still.reset_reference(archive, "a")
