"""PlateauBeta, BatchBeta and TargetKL: the golden values, runs, resumes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from alignment.batches import Group, GroupBatch
from alignment.controllers import Plateau
from alignment.errors import UserError
from alignment.pair_beta import PairBeta
from alignment.pairs import pair_gaps
from alignment.reference import FrozenCopy
from alignment.tiny import tiny_tokenizer
from alignment.update import UNIT
from callbacks import BatchBeta, PlateauBeta, TargetKL
from datamodules import PreferenceData
from datamodules.planned import MixConfig
from modules import DPO, GRPO, KTO, SFT, OnlineDPO, SimPO
from tests.callback_toys import Trained, weights
from tests.rl_toys import fit, moved, online
from tests.toys import OPTIM, TINY, FixedData, groups, trainer
from tests.unit.test_planned import rows

GAPS = [2.0, 0.5, -1.0, 3.5]


def dpo(**settings: Any) -> Any:
    return DPO(**({"policy": TINY, "optim": OPTIM, "beta": 0.1} | settings))


def pairs(count: int = 8, batch_size: int = 4) -> FixedData:
    return FixedData(groups(count, 2), batch_size=batch_size)


# ---------------------------------------------------------------------- the plateau


GOLDEN = [0.60, 0.62, 0.62, 0.61, 0.62, 0.63, 0.63, 0.63, 0.63, 0.63, 0.63, 0.63]
BETAS = [0.1, 0.1, 0.1, 0.1, 0.08, 0.08, 0.08, 0.08, 0.064, 0.064, 0.064, 0.0512]


ACCURACY = "val/rewards/accuracies"


def evaluated(callback: PlateauBeta, module: Any, scores: list[float], name: str = ACCURACY) -> list[float]:
    """Beta after each epoch with one validation."""
    run, found = Trained(), []
    callback.setup(run, module, "fit")
    for score in scores:
        run.callback_metrics = {name: torch.tensor(score, dtype=torch.float64)}
        callback.on_validation_end(run, module)
        callback.on_train_epoch_end(run, module)
        found.append(float(module.schedulables["beta"].value))
    return found


def test_golden_plateau() -> None:
    assert evaluated(PlateauBeta(), dpo(), GOLDEN) == pytest.approx(BETAS)


def test_golden_plateau_across_a_resume_and_under_another_base() -> None:
    """The callback's memory is its own, the factor is the module's; a stage doubles beta meanwhile."""
    module, callback, again = dpo(), PlateauBeta(), PlateauBeta()
    evaluated(callback, module, GOLDEN[:7])
    again.load_state_dict(callback.state_dict())
    other = dpo()
    other.schedulables.load_state_dict(module.schedulables.state_dict())
    other.beta = 0.2
    assert evaluated(again, other, GOLDEN[7:]) == pytest.approx([2 * beta for beta in BETAS[7:]])


def test_an_epoch_counts_once_by_its_best_and_checks_each() -> None:
    for every, expected in (("epoch", 0.1), ("check", 0.08)):
        module, run, callback = dpo(), Trained(), PlateauBeta(every=every)
        callback.setup(run, module, "fit")
        for score in (0.6, 0.5, 0.5, 0.5):
            run.callback_metrics = {"val/rewards/accuracies": torch.tensor(score)}
            callback.on_validation_end(run, module)
        callback.on_train_epoch_end(run, module)
        assert module.beta == pytest.approx(expected)
        assert run.events == (["plateau_beta"] if every == "check" else [])


def test_the_floor() -> None:
    """.1 x .5 = .05, then .03 and no further."""
    module = dpo()
    found = evaluated(PlateauBeta(factor=0.5, patience=1, floor=0.03), module, [0.9, 0.1, 0.1, 0.1])
    assert found == pytest.approx([0.1, 0.05, 0.03, 0.03])
    module.beta = 0.02  # a stage goes below it: a fall never raises beta
    evaluated(PlateauBeta(factor=0.5, patience=1, floor=0.03), module, [0.9, 0.1])
    assert module.beta == pytest.approx(0.02 * 0.3)


def test_less_is_better() -> None:
    callback = PlateauBeta("val/loss", mode="min", patience=1)
    assert evaluated(callback, dpo(), [0.7, 0.6, 0.65], "val/loss") == pytest.approx([0.1, 0.1, 0.08])


def test_nan_and_the_sanity_check_do_not_count() -> None:
    module, run, callback = dpo(), Trained(), PlateauBeta(patience=1)
    callback.setup(run, module, "fit")
    for score, sanity in ((9.0, True), (0.5, False), (math.nan, False), (0.6, False)):
        run.sanity_checking = sanity
        run.callback_metrics = {"val/rewards/accuracies": torch.tensor(score)}
        callback.on_validation_end(run, module)
        callback.on_train_epoch_end(run, module)
    assert module.beta == 0.1


def test_the_kl_of_a_module_that_samples(tmp_path: Path) -> None:
    module = online(GRPO, kl={"coefficient": 0.2})
    callback = PlateauBeta(patience=1, min_delta=100.0)
    fit(module, tmp_path, callbacks=[callback], max_epochs=3, limit_val_batches=1, num_sanity_val_steps=0)
    assert module.kl.coefficient == pytest.approx(0.2 * 0.64)


def test_plateau_by_itself() -> None:
    memory = Plateau(patience=2)
    assert [memory.update(score) for score in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)] == [
        False, False, True, False, False, False, True,
    ]  # fmt: skip


# ---------------------------------------------------------------------- beta-DPO


def test_golden_beta_dpo() -> None:
    rule = PairBeta(mean=1.0, deviation=1.5)
    assert rule.weights(GAPS) == pytest.approx([0.800737, 0.945959, 0.411112, 0.249352], abs=1e-6)
    assert 0.1 * rule.factor(GAPS) == pytest.approx(0.115)
    assert 0.1 * rule.factor([GAPS[i] for i in (0, 1, 3)]) == pytest.approx(0.16)
    loss = -F.logsigmoid(0.115 * torch.tensor(GAPS, dtype=torch.float64)).mean()
    assert float(loss) == pytest.approx(0.628467, abs=1e-6)


def test_golden_moving_averages() -> None:
    rule = PairBeta(mean=0.0, deviation=0.0)
    rule.update(GAPS)
    assert (rule.mean, rule.deviation) == pytest.approx((0.125, 0.193649), abs=1e-6)
    first = PairBeta()
    first.update(GAPS)
    assert (first.mean, first.deviation) == pytest.approx((1.25, 1.936492), abs=1e-6)


def test_how_many_are_kept() -> None:
    rule = PairBeta()
    rule.update([1.0, 2.0])
    for count, expected in ((1, 1), (2, 1), (4, 3), (5, 4), (10, 8)):
        assert len(rule.keep([1.0] * count, 0, 0, list(range(count)))) == expected
    assert PairBeta(drop=0.0, mean=0.0, deviation=1.0).keep(GAPS, 0, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_the_draw_is_one_without_replacement() -> None:
    """One of two pairs with weights 1 and w: the first is kept in 1 / (1 + w) of the draws."""
    rule = PairBeta(drop=0.5, mean=0.0, deviation=1.0)
    gaps = [0.0, 1.5]
    weight = math.exp(-0.5 * 1.5**2)
    kept = [rule.keep(gaps, 0, step, [7, 9])[0] for step in range(4000)]
    assert kept.count(0) / 4000 == pytest.approx(1 / (1 + weight), abs=4 * math.sqrt(0.25 / 4000))


def test_the_draw_does_not_depend_on_the_order_of_pairs() -> None:
    rule = PairBeta(drop=0.5, mean=1.0, deviation=1.0)
    names = [5, 3, 8, 1]
    kept = {names[i] for i in rule.keep(GAPS, 1, 2, names)}
    order = [2, 0, 3, 1]
    again = rule.keep([GAPS[i] for i in order], 1, 2, [names[i] for i in order])
    assert {names[order[i]] for i in again} == kept


def test_pairs_far_from_the_mean_and_gaps_without_spread() -> None:
    rule = PairBeta(mean=0.0, deviation=1e-3)
    assert rule.keep([0.0, 1e6, 0.0, 0.0, 0.0], 0, 0, list(range(5))) == [0, 2, 3, 4]
    even = PairBeta()
    even.update([0.0, 0.0])
    assert even.weights([0.0, 5.0]) == [1.0, 1.0]
    assert even.factor([0.0]) == 1.0


def test_gaps_are_those_of_the_loss_whatever_the_micro_batches() -> None:
    module = moved(dpo(reference="copy"))
    batch = GroupBatch.from_groups(groups(6, 2))
    logps = module.engine(batch).logps
    expected = module.log_ratios(batch, logps).delta
    assert not torch.allclose(expected, torch.zeros(6))
    for tokens in (None, 16):
        module.micro_batch_tokens = tokens
        torch.testing.assert_close(module.preference_gaps(batch), expected, atol=1e-4, rtol=1e-4)
    assert not module.preference_gaps(batch).requires_grad
    empty = pair_gaps(batch.select_groups([]), module.policy, module.engine, module.log_ratios, 16)
    assert empty.shape == (0,)


def test_batch_beta_of_a_run(tmp_path: Path) -> None:
    """The first batch's gaps are 0: beta is .1, and 3 of 4 pairs count. In the second the log shows what the formula
    makes of the gaps of the pairs kept."""
    module, callback = dpo(), BatchBeta()
    seen: list[Any] = []

    class Look(BatchBeta):
        def _choose(self, batch: Any) -> Any:
            gaps = module.preference_gaps(batch).double().tolist()
            chosen = super()._choose(batch)
            kept = chosen.group_index.tolist()
            seen.append((gaps, [gaps[batch.group_index.tolist().index(i)] for i in kept]))
            return chosen

    callback = Look()
    watch, _ = fit(module, tmp_path, pairs(), callbacks=[callback])
    assert [len(kept) for _, kept in seen] == [3, 3]
    assert watch.updates[0]["beta"] == pytest.approx(0.1)
    mean = 0.1 * float(np.mean(seen[1][0]))  # .9 x 0 + .1 x
    beta = max(0.1 * (1 + 0.6 * (float(np.mean(seen[1][1])) - mean)), 1e-3)
    assert watch.updates[1]["beta"] == pytest.approx(beta, rel=1e-5)
    assert watch.logged[1]["schedule/beta"] == pytest.approx(beta, rel=1e-5)
    assert watch.logged[1]["beta_dpo/mean"] == pytest.approx(mean, rel=1e-5)
    assert watch.logged[1]["beta_dpo/kept"] == 0.75
    assert module.beta == 0.1  # between batches, where validation is


def test_a_row_that_a_batch_holds_twice_counts_once(tmp_path: Path) -> None:
    """Of the rows 0, 1, 1, 1, 2, 3 four gaps count, three of them are kept, and each with all its copies."""
    module, callback = moved(dpo(reference="copy")), BatchBeta()
    found: list[Any] = []

    def looked(batch: GroupBatch) -> GroupBatch:
        gaps = dict(zip(batch.group_index.tolist(), module.preference_gaps(batch).double().tolist(), strict=True))
        chosen = BatchBeta._choose(callback, batch)
        found.append((gaps, chosen.group_index.tolist()))
        return chosen

    callback._choose = looked  # type: ignore[method-assign]
    held = groups(4, 2)
    data = FixedData([held[i] for i in (0, 1, 1, 1, 2, 3)], batch_size=6)
    watch, _ = fit(module, tmp_path, data, callbacks=[callback])
    ((gaps, kept),) = found
    assert len(set(kept)) == 3
    assert kept == [i for i in (0, 1, 1, 1, 2, 3) if i in kept]
    mean = float(np.mean(list(gaps.values())))
    shown = watch.logged[0]
    assert shown["beta_dpo/mean"] == pytest.approx(mean, rel=1e-5)
    assert shown["beta_dpo/deviation"] == pytest.approx(float(np.std(list(gaps.values()), ddof=1)), rel=1e-5)
    assert shown["beta_dpo/kept"] == 0.75
    beta = 0.1 * (1 + 0.6 * (float(np.mean([gaps[i] for i in set(kept)])) - mean))
    assert watch.updates[0]["beta"] == pytest.approx(max(beta, 1e-3), rel=1e-5)


def test_a_fixed_mix_gives_a_row_twice_and_it_counts_once(tmp_path: Path) -> None:
    """Four of six seats for the one row of `code`: of three rows, two are kept."""
    path = rows(tmp_path, 6, source=lambda i: "chat" if i else "code")
    mix = MixConfig(column="source", ratio={"chat": 2, "code": 4})
    settings: dict[str, Any] = {"cache_dir": None, "val_fraction": 0.0, "batch_size": 6}
    data = PreferenceData(path, mix=mix, tokenizer=tiny_tokenizer(), **settings)
    watch, _ = fit(dpo(), tmp_path, data, callbacks=[BatchBeta()], max_steps=1)
    assert watch.logged[0]["beta_dpo/kept"] == pytest.approx(2 / 3)


def test_the_reference_is_asked_once(tmp_path: Path) -> None:
    """For the gaps; the update of the pairs kept needs it no more. Each token of the eight pairs once."""
    module, asked = dpo(reference="copy"), []
    token_logps = FrozenCopy.token_logps

    def counted(self: FrozenCopy, batch: GroupBatch, temperature: float = 1.0) -> torch.Tensor:
        asked.append(len(batch.completion_ids))
        return token_logps(self, batch, temperature)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrozenCopy, "token_logps", counted)
        fit(module, tmp_path, pairs(), callbacks=[BatchBeta()])
    assert sum(asked) == len(GroupBatch.from_groups(groups(8, 2)).completion_ids)


def test_the_smallest_beta(tmp_path: Path) -> None:
    module = dpo(beta=0.02)
    module.schedulables["beta"].scale("x", 0.5)
    callback = BatchBeta(alpha=1e6, smallest=0.004)
    watch, _ = fit(module, tmp_path, FixedData(groups(16, 2), batch_size=4), callbacks=[callback])
    found = [row["beta"] for row in watch.updates]
    assert min(found) == pytest.approx(0.004)


def test_a_rule_that_does_nothing_changes_nothing(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [BatchBeta(alpha=0.0, drop=0.0)], [PlateauBeta(patience=9)]):
        module = dpo()
        fit(module, tmp_path, pairs(), callbacks=callbacks, limit_val_batches=1, num_sanity_val_steps=0)
        found.append(weights(module))
    assert found[0] == found[1] == found[2]


def labelled() -> FixedData:
    rows = [Group(prompt=[1, i + 4], completions=[[i + 5, 3]], rows={"label": [float(i % 2)]}) for i in range(8)]
    return FixedData(rows, batch_size=4)


@pytest.mark.parametrize(
    ("module", "data", "score"),
    [
        (lambda: SimPO(policy=TINY, optim=OPTIM, beta=0.1), pairs, ACCURACY),
        (lambda: KTO(policy=TINY, optim=OPTIM, beta=0.1), labelled, "val/accuracy"),
        (lambda: online(OnlineDPO, beta=0.1), lambda: None, "val/reward"),
    ],
)
def test_what_a_plateau_is_of_by_default(
    module: Any, data: Any, score: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No score is a new best after the first of the two validations."""
    own, callback = module(), PlateauBeta(patience=1, min_delta=9.0, every="check")
    settings = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 1}
    fit(own, tmp_path, data(), callbacks=[callback], **settings)
    assert own.beta == pytest.approx(0.08)
    assert f"{score} has not got better" in caplog.text


# ---------------------------------------------------------------------- a distance to hold


def test_golden_controller() -> None:
    """Beta .2, target 6, batches of 64: after 9, 6.6 or 0 once, and after 100 saturated ones."""
    golden = ((9.0, 1, 0.200256), (6.6, 1, 0.200128), (0.0, 1, 0.199744), (99.0, 100, 0.227292))
    for measured, times, expected in golden:
        module, run, callback = dpo(beta=0.2), Trained(), TargetKL(6.0, monitor="kl")
        module.last_metrics = {"kl": (torch.tensor(measured), torch.tensor(1.0))}
        callback.setup(run, module, "fit")
        for _ in range(times):
            callback.on_train_batch_end(run, module, None, SimpleNamespace(num_prompts=64), 0)
        assert module.beta == pytest.approx(expected, abs=1e-6)


def test_target_by_hand(tmp_path: Path) -> None:
    """The first batch's distance is 0, an error clipped to -.2: x (1 - .2 x 4 / 100). Then what is measured."""
    module = dpo()
    watch, _ = fit(module, tmp_path, FixedData(groups(12, 2), batch_size=4), callbacks=[TargetKL(1e-3, horizon=100)])
    factor = 1.0
    for row in watch.updates:
        assert row["beta"] == pytest.approx(0.1 * factor)
        factor *= 1 + min(max(row["kl/data"] / 1e-3 - 1, -0.2), 0.2) * 4 / 100
    assert watch.updates[1]["beta"] == pytest.approx(0.0992)
    assert watch.updates[1]["kl/data"] > 0
    assert module.beta == pytest.approx(0.1 * factor)


def test_distance_on_the_data() -> None:
    """Half the squared log-ratio of each completion, and their mean."""
    module = moved(dpo(reference="copy"))
    batch = GroupBatch.from_groups(groups(3, 2))
    logps = module.engine(batch).logps
    ratios = batch.sum_tokens(logps - module.reference_logps(batch)).double()
    total, count = module.loss(batch, UNIT)[1]["kl/data"]
    assert float(total / count) == pytest.approx(float((ratios**2 / 2).mean()), rel=1e-5)
    assert float(total) > 0


def test_target_of_a_module_that_samples(tmp_path: Path) -> None:
    module = online(GRPO, kl={"coefficient": 0.2})
    watch, _ = fit(module, tmp_path, callbacks=[TargetKL(1.0, horizon=100)])
    assert watch.logged[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert module.kl.coefficient == pytest.approx(0.2 * 0.992**2, rel=1e-3)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlateauBeta(factor=1.0), "factor is 1.0"),
        (lambda: PlateauBeta(floor=-1.0), "floor -1.0"),
        (lambda: PlateauBeta(patience=0), "patience of at least 1"),
        (lambda: PlateauBeta(every="day"), "every 'day'"),
        (lambda: PlateauBeta(mode="up"), "mode is 'up'"),
        (lambda: BatchBeta(alpha=-1.0), "alpha of at least 0"),
        (lambda: BatchBeta(drop=1.0), "below 1"),
        (lambda: BatchBeta(smallest=0.0), "smallest is 0.0"),
        (lambda: TargetKL(0.0), "target"),
        (lambda: TargetKL(1.0, ema=1.0), "ema is 1.0"),
    ],
)
def test_bad_settings(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("callback", "module", "said"),
    [
        (lambda: BatchBeta(), lambda: online(GRPO), r"BatchBeta needs a module of preference pairs .* not a GRPO"),
        (lambda: PlateauBeta(), lambda: online(GRPO), r"kl\.coefficient cannot be moved: at 0 no reference is loaded"),
        (
            lambda: TargetKL(1.0, value="kl.coefficient"),
            lambda: online(OnlineDPO),
            r"kl\.coefficient cannot be moved: what holds OnlineDPO to its reference is beta",
        ),
        (lambda: TargetKL(1.0), lambda: SimPO(policy=TINY, optim=OPTIM), "watches kl/data, which no update reports"),
        (lambda: PlateauBeta(value="betta"), dpo, "no value 'betta'"),
        (lambda: PlateauBeta(floor=0.1), dpo, "beta is 0.1, not above the floor of 0.1, so it cannot fall; give"),
        (
            lambda: PlateauBeta(),
            lambda: online(GRPO, kl={"coefficient": 0.001}),
            r"kl\.coefficient is 0.001, not above the floor of 0.01",
        ),
        (lambda: PlateauBeta("val/acc"), dpo, r"watches val/acc, which is not logged; there is val/.*accuracies"),
        (
            lambda: TargetKL(1.0),
            lambda: online(GRPO, kl={"coefficient": 0.1, "target": 1.0}),
            r"TargetKL and kl\.target would both hold the KL",
        ),
        (lambda: TargetKL(1.0, monitor="kll"), dpo, "watches kll, which no update reports; there is .*kl/data"),
    ],
)
def test_where_they_do_not_belong(callback: Any, module: Any, said: str, tmp_path: Path) -> None:
    own = module()
    data = pairs() if isinstance(own, DPO | SimPO) else None
    with pytest.raises(UserError, match=said) as caught:
        fit(own, tmp_path, data, callbacks=[callback()], limit_val_batches=1)
    assert "\n" not in str(caught.value)


def test_two_of_a_kind_on_one_value(tmp_path: Path) -> None:
    """beta is what both multiply, named or not; with monitors of their own they are two causes: .1 x .8 x .5, as
    neither loss nor accuracy is better by 9 after the first epoch. TargetKL alike."""
    settings: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 2}
    twins = ([PlateauBeta(), PlateauBeta(value="beta")], [TargetKL(1.0), TargetKL(2.0, value="beta")])
    for callbacks in twins:
        with pytest.raises(UserError, match="would have one factor on beta; leave one of them out, or") as error:
            fit(dpo(), tmp_path, pairs(), callbacks=callbacks, **settings)
        assert "\n" not in str(error.value)
    module = dpo()
    ones = [PlateauBeta(patience=1, min_delta=9.0), PlateauBeta("val/loss", "min", 0.5, patience=1, min_delta=9.0)]
    fit(module, tmp_path, pairs(), callbacks=ones, **settings)
    assert module.beta == pytest.approx(0.1 * 0.8 * 0.5)
    assert len({one.state_key for one in (*ones, PlateauBeta(value="beta"))}) == 3


@pytest.mark.parametrize("without", [{"limit_val_batches": 0}, {"limit_val_batches": 1.0}])
def test_a_plateau_without_validation(without: dict[str, Any], tmp_path: Path) -> None:
    data = PreferenceData(rows(tmp_path), val_fraction=0.0, tokenizer=tiny_tokenizer(), cache_dir=None, batch_size=4)
    with pytest.raises(UserError, match="watches a score of validation, and this run has none: give it"):
        fit(dpo(), tmp_path, data, callbacks=[PlateauBeta()], **without)


def test_a_module_without_either(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a SFT has neither beta nor kl\.coefficient"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, FixedData(groups(8, 1)), callbacks=[PlateauBeta()])


def test_two_that_choose_batches(tmp_path: Path) -> None:
    module = dpo()
    module.before_batch = lambda batch: batch
    with pytest.raises(UserError, match="something else chooses the batches already"):
        fit(module, tmp_path, pairs(), callbacks=[BatchBeta()])


def test_it_lets_go(tmp_path: Path) -> None:
    module = dpo()
    fit(module, tmp_path, pairs(), callbacks=[BatchBeta()])
    assert module.before_batch is None
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(dpo(), datamodule=pairs())
