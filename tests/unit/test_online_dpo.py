"""Online DPO: which completions become pairs, DPO's golden values on them, the same update as DPO on the same pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.advantages import RewardTable
from alignment.batches import Group, GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, REF_LOGPS, TRUNCATED, table_of
from alignment.losses import PairLogRatios
from alignment.optim import OptimConfig
from alignment.rollout import SAMPLER_LOGPS
from alignment.sampled_pairs import best_and_worst, take_pairs
from alignment.update import Counts
from modules.dpo import DPO
from modules.online_dpo import OnlineDPO
from tests.rl_toys import SAMPLING, SaidBefore, fit, here, moved, odd, online, prompts, scripted
from tests.toys import TINY, FixedData, trainer
from tests.unit.test_module_options import GOLDEN

NAN = float("nan")
SGD = OptimConfig(lr=1e-2, optimizer="sgd", schedule="constant", clip_norm=None)


# ---------------------------------------------------------------------- pairs


def signals(scores: list[list[float]], eligible: list[bool] | None = None) -> list[float]:
    """Pairs among groups with these scores."""
    values = torch.tensor([s for group in scores for s in group], dtype=torch.float64)
    group_of = torch.tensor([p for p, group in enumerate(scores) for _ in group])
    may = torch.ones(len(values), dtype=torch.bool) if eligible is None else torch.tensor(eligible)
    return best_and_worst(RewardTable.of_scores(values, group_of), may).tolist()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[1.0, 0.0]], [1, -1]),
        ([[0.0, 1.0]], [-1, 1]),
        ([[0.2, 0.9, -3.0, 0.5]], [0, 1, -1, 0]),
        ([[1.0, 1.0]], [0, 0]),  # a tie
        ([[0.0, 2.0, 2.0, 0.0]], [-1, 1, 0, 0]),  # among equals the first
        ([[NAN, 1.0, 0.0]], [0, 1, -1]),  # an abstention
        ([[NAN, 1.0, NAN]], [0, 0, 0]),  # one score is not a comparison
        ([[NAN, NAN]], [0, 0]),
        ([[0.1 + 0.2, 0.3]], [0, 0]),  # differ by rounding alone
        ([[1e6, 1e6 + 0.5]], [0, 0]),  # the same, for large scores: FLAT is relative
        ([[-1.0, -2.0], [5.0, 5.0], [0.0, 3.0]], [1, -1, 0, 0, -1, 1]),
    ],
)
def test_best_and_worst(scores: list[list[float]], expected: list[float]) -> None:
    assert signals(scores) == expected


def test_a_completion_that_may_not_be_in_a_pair_is_in_none() -> None:
    assert signals([[5.0, 1.0, 0.0], [2.0, 1.0]], [False, True, True, True, False]) == [0, 1, -1, 0, 0]


def test_scores_are_weighted_sums_of_what_applies() -> None:
    """0.5 a + 2 b: 0.5, 2, and 1 where b abstains; a third reward of weight 0 has no say."""
    table = RewardTable(
        rewards=torch.tensor([[1.0, 0.0, 9.0], [0.0, 1.0, 0.0], [2.0, NAN, 0.0]]),
        weights=torch.tensor([0.5, 2.0, 0.0]),
        group_of=torch.zeros(3, dtype=torch.int64),
        groups=1,
    )
    assert best_and_worst(table, torch.ones(3, dtype=torch.bool)).tolist() == [-1, 1, 0]


def marked(*signal: list[float]) -> GroupBatch:
    """Groups of completions [10 p + i, 3], marked so."""
    rows = [
        Group(prompt=[1, p + 5], completions=[[10 * (p + 1) + i, 3] for i in range(len(group))], index=p)
        for p, group in enumerate(signal)
    ]
    return GroupBatch.from_groups(rows).with_rows(**{ADVANTAGE: torch.tensor([s for group in signal for s in group])})


def test_pairs_are_chosen_before_rejected() -> None:
    found = take_pairs(marked([-1, 0, 1], [0, 0, 0], [1, -1, 0]))
    assert found.completion_ids[::2].tolist() == [12, 10, 30, 31]
    assert found.prompt_ids.tolist() == [1, 5, 1, 7]
    assert found.group_index.tolist() == [0, 2]
    chosen, rejected = found.pair(found.rows[ADVANTAGE])
    assert (chosen.tolist(), rejected.tolist()) == ([1, 1], [-1, -1])
    assert found.weights.tolist() == [1] * 4


def test_without_any_pair_two_completions_of_each_group_stay_at_weight_0() -> None:
    found = take_pairs(marked([0, 0, 0], [0, 0]))
    assert found.completion_ids[::2].tolist() == [10, 11, 20, 21]
    assert found.weights.tolist() == [0] * 4


# ---------------------------------------------------------------------- the loss

# [G-DPO] of ALGORITHMS section 6: summed log-probs and lengths.
LENGTHS = [(5, 6), (8, 4), (3, 3)]
POLICY = [(-10.0, -12.0), (-20.0, -19.0), (-15.0, -9.0)]
REFERENCE = [(-11.0, -11.5), (-20.5, -18.2), (-14.0, -9.4)]


def spread(sums: list[tuple[float, float]]) -> Tensor:
    """[29] each sum, spread over its completion; the rejected one comes first in the second group."""
    order = [(0, 1), (1, 0), (0, 1)]
    return torch.cat(
        [torch.full((LENGTHS[p][side],), sums[p][side] / LENGTHS[p][side]) for p in range(3) for side in order[p]]
    )


def golden() -> GroupBatch:
    """Each pair with its better completion marked, before the pairs are taken out."""
    order = [(0, 1), (1, 0), (0, 1)]
    rows = [Group(prompt=[1], completions=[[5 + side] * LENGTHS[p][side] for side in order[p]]) for p in range(3)]
    signal = torch.tensor([1.0 if side == 0 else -1.0 for sides in order for side in sides])
    tokens = {REF_LOGPS: spread(REFERENCE), SAMPLER_LOGPS: spread(POLICY), "policy": spread(POLICY)}
    return GroupBatch.from_groups(rows).with_rows(**{ADVANTAGE: signal}).with_tokens(**tokens)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *GOLDEN,
        # [G-DPO] of the rest of the family, and a mix.
        ({"loss": "exo"}, 2.683239),
        ({"loss": "nca", "beta": 0.1}, 1.376252),
        ({"loss": "apo_zero"}, 0.988338),
        ({"loss": "sppo_hard", "beta": 0.1}, 46.433333),
        ({"loss": {"sigmoid": 0.5, "hinge": 0.25}}, 0.5 * 0.672270 + 0.25 * 0.953333),
        ({"loss": "tests.unit.test_online_dpo.squared"}, (1.5**2 + 1.3**2 + 1.4**2) / 3),
        ({"entropy": {"coefficient": 0.1}}, 0.672270 - 0.1),  # every entropy is 1 here
    ],
)
def test_golden_losses(settings: dict[str, Any], expected: float) -> None:
    module = online(OnlineDPO, **settings)
    pairs = take_pairs(golden())
    module.engine = SaidBefore(pairs.tokens["policy"])
    share, metrics = module.loss(pairs, Counts(prompts=3, rows=6, tokens=29))
    assert float(share.detach()) == pytest.approx(expected, rel=1e-6, abs=2e-6)
    if not settings:
        means = {name: float(total / count) for name, (total, count) in metrics.items()}
        assert means["rewards/chosen"] == pytest.approx(0.05 / 3, abs=1e-6)  # 0.1, 0.05, -0.1
        assert means["rewards/rejected"] == pytest.approx(-0.09 / 3, abs=1e-6)  # -0.05, -0.08, 0.04
        assert means["rewards/margins"] == pytest.approx(0.046667, abs=1e-6)
        assert means["rewards/accuracies"] == pytest.approx(2 / 3)
        assert means["loss/policy_avg"] == pytest.approx(0.672270, abs=1e-6)


def squared(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """A user's loss."""
    return pairs.delta**2


def test_micro_batches_add_up() -> None:
    """C1: one pair at a time gives the shares of the whole."""
    module, pairs = online(OnlineDPO), take_pairs(golden())
    total = 0.0
    for p in range(3):
        part = pairs.select_groups([p])
        module.engine = SaidBefore(part.tokens["policy"])
        total += float(module.loss(part, Counts(prompts=3, rows=6, tokens=29))[0].detach())
    assert total == pytest.approx(0.672270, abs=1e-6)


# ---------------------------------------------------------------------- in a run

SAID = [[21, 3], [20, 22, 24], [23, 20, 3], [25, 27]]
"""Shares of odd ids 1, 0, 2/3 and 1: the first is chosen, the second rejected."""


@pytest.mark.parametrize("bound", [None, 24])
@pytest.mark.parametrize("loss", ["sigmoid", "aot", "bco", "sft"])
def test_an_update_is_that_of_dpo_on_the_pairs(bound: int | None, loss: str, tmp_path: Path) -> None:
    """From a policy that has left its reference, four prompts; micro-batches of one pair change nothing, not even where
    a loss sorts the pairs of the batch or takes their mean."""
    module = scripted(moved(online(OnlineDPO, loss=loss, optim=SGD, micro_batch_tokens=bound)), SAID)
    watch, _ = fit(module, tmp_path, FixedData(prompts(4), batch_size=4))
    offline = moved(DPO(policy=TINY, loss=loss, reference="copy", optim=SGD))
    pairs = [replace(group, completions=[SAID[0], SAID[1]]) for group in prompts(4)]
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(offline, datamodule=FixedData(pairs, batch_size=4))
    ours, theirs = module.policy.state_dict(), offline.policy.state_dict()
    assert max(float((ours[name] - value).abs().max()) for name, value in theirs.items()) < 1e-6
    start = moved(online(OnlineDPO)).policy.state_dict()
    assert max(float((ours[name] - value).abs().max()) for name, value in start.items()) > 1e-4
    (update,) = watch.updates
    assert update["loss"] == pytest.approx(float(run.callback_metrics["loss"]), abs=1e-6)
    assert watch.logged[0]["pairs/found"] == 1
    assert watch.logged[0]["pairs/gap"] == pytest.approx(1)


def test_at_the_start_the_loss_is_ln_2(tmp_path: Path) -> None:
    watch, _ = fit(online(OnlineDPO), tmp_path)
    assert watch.updates[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    for name in ("kl", "rewards/chosen", "rewards/rejected"):
        assert watch.updates[0][name] == pytest.approx(0, abs=1e-5)
    assert watch.logged[0]["objective/kl"] == pytest.approx(0, abs=1e-5)


def test_prompts_without_a_pair_do_not_count(tmp_path: Path) -> None:
    """Half of the prompts tie: the gradient is that of the others alone, not half of it."""
    gradients = []
    for alive in ([True, False, True, False], [True, True]):
        count = len(alive)
        data = prompts(4, alive=[True, False, True, False])
        rows = data if count == 4 else [data[0], data[2]]
        module = scripted(moved(online(OnlineDPO, rewards={"odd": here(odd_if_alive)}, optim=SGD)), SAID)
        watch, _ = fit(module, tmp_path, FixedData(rows, batch_size=4))
        gradients.append(watch.gradients[0])
        assert watch.logged[0]["pairs/found"] == pytest.approx(sum(alive) / count)
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=0)


def odd_if_alive(completion: str, completion_ids: list[int], alive: bool) -> float:
    return odd(completion, completion_ids) if alive else 1.0


def abstains(completion: str, completion_ids: list[int]) -> float | None:
    """None for the completion that would be the best, and for the one that would be the worst."""
    share = odd(completion, completion_ids)
    return None if share in (0.0, 1.0) and len(completion_ids) != 2 else share


def same(completion: str) -> float:
    return 1.0


def test_no_pair_anywhere_is_a_step_without_a_gradient(tmp_path: Path) -> None:
    module = online(OnlineDPO, rewards={"same": here(same)}, optim=SGD)
    module.configure_model()
    before = {name: value.clone() for name, value in module.policy.state_dict().items()}
    watch, run = fit(module, tmp_path)
    assert run.global_step == 2
    assert all(torch.equal(value, before[name]) for name, value in module.policy.state_dict().items())
    assert [update["loss"] for update in watch.updates] == [0, 0]
    assert all(bool((g == 0).all()) and len(g) > 0 for g in watch.gradients)
    assert watch.logged[-1]["pairs/found"] == 0


@pytest.mark.parametrize(("cut", "chosen"), [(False, [21, 3]), (True, [25, 27])])
def test_truncated_completions_are_in_pairs_unless_masked(cut: bool, chosen: list[int], tmp_path: Path) -> None:
    """The first completion, the best, was cut off by the limit."""
    module = scripted(online(OnlineDPO, mask_truncated=cut), SAID, [True, False, False, False])
    batches: list[GroupBatch] = []
    update = module.update
    module.update = lambda batch, loss: (batches.append(batch), update(batch, loss))
    fit(module, tmp_path, FixedData(prompts(2), batch_size=2))
    ids = [part.tolist() for part in torch.split(batches[0].completion_ids, batches[0].completion_lengths.tolist())]
    assert ids == [chosen, SAID[1]] * 2


def test_credit_reads_abstentions_as_no_score() -> None:
    module = online(OnlineDPO, rewards={"some": here(abstains)})
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=SAID)])
    values = torch.tensor([1.0, NAN, 2 / 3, NAN])
    batch = batch.with_rows(**{"reward/some": values, TRUNCATED: torch.zeros(4)})
    out = module.credit(batch, table_of(batch, module.suite.names, module.suite.weights))
    assert out.rows[ADVANTAGE].tolist() == [1, 0, -1, 0]


def test_it_learns(tmp_path: Path) -> None:
    """Odd ids, from a share of about a half."""
    optim = OptimConfig(lr=3e-3, schedule="constant")
    module = online(OnlineDPO, completions=8, optim=optim, sampling=replace(SAMPLING, max_tokens=4))
    watch, _ = fit(module, tmp_path, FixedData(prompts(8), batch_size=8), max_epochs=30)
    rewards = [logged["reward"] for logged in watch.logged]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.2, (first, last)
    assert watch.logged[-1]["rewards/accuracies"] > 0.6


def test_several_updates_of_a_rollout_keep_pairs_whole(tmp_path: Path) -> None:
    """Two epochs of two minibatches: four steps a batch, each on the pairs of half of the prompts."""
    module = scripted(online(OnlineDPO, epochs=2, minibatches=2), SAID)
    watch, run = fit(module, tmp_path, FixedData(prompts(4), batch_size=4))
    assert run.global_step == 4
    assert all(update["beta"] == pytest.approx(0.1) for update in watch.updates)
    assert watch.updates[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert watch.updates[3]["loss"] < math.log(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"completions": 1}, "completions is 1, and a pair is made of two"),
        ({"loss": "modpo"}, "preference loss 'modpo' reads margins of a data set"),
        ({"loss": {"sigmoid": 1.0, "modpo": 1.0}}, "preference loss 'modpo' reads margins of a data set"),
        ({"loss": "nothing"}, "preference loss 'nothing' is not known"),
        ({"beta": 0.0}, "beta is 0.0; it must be positive"),
        ({"kl": {"coefficient": 0.1}}, "kl cannot be set: what holds OnlineDPO to its reference is beta"),
        ({"entropy": {"keep": 0.2}}, "entropy.keep selects tokens"),
        ({"reference": "cached"}, "for sampled completions it is one of auto, adapter_off, frozen_adapter, copy"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        online(OnlineDPO, **settings)


def test_the_papers_defaults() -> None:
    module = OnlineDPO(policy=TINY, rewards={"odd": here(odd)})
    assert (module.beta, module.completions, module.temperature) == (0.1, 2, 0.9)
    assert (module.optim.lr, module.optim.warmup_steps) == (5e-7, 150)


def test_a_checkpoint_rebuilds_it_and_keeps_a_beta_that_moved(tmp_path: Path) -> None:
    module = online(OnlineDPO, loss="ipo", beta=0.3, completions=3, mask_truncated=True)
    _, run = fit(module, tmp_path, max_steps=1, plugins=[SafeCheckpointIO()])
    module.beta = 0.25
    run.save_checkpoint(tmp_path / "c")
    again = OnlineDPO.load_from_checkpoint(tmp_path / "c")
    assert dict(again.hparams) == dict(module.hparams)
    assert (again.beta, again.completions, again.mask_truncated) == (0.25, 3, True)
    assert again.pair_loss.weights == module.pair_loss.weights == {"ipo": 1.0}
