"""Stages: ramps and lengths by hand, the golden values, and what a run does with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alignment.errors import UserError
from alignment.optim import OptimConfig
from alignment.schedulable import Schedulable, Schedulables
from alignment.stages import Position, Ramp, StageConfig, Until, Walk, amount
from alignment.tiny import tiny_tokenizer
from callbacks import PlateauBeta, Stages
from datamodules import PreferenceData
from modules import DPO, GRPO, SFT
from tests.callback_toys import Trained, weights
from tests.rl_toys import fit, here, online, prompts
from tests.toys import OPTIM, TINY, FixedData, groups
from tests.unit.test_planned import rows

THREE = {
    "warm": {"steps": 100, "values": {"beta": 0.05}},
    "ramp": {"steps": 200, "values": {"beta": {"end": 0.2}}},
    "rest": {},
}


class Module:
    """What Stages sees of a module."""

    updates_per_batch = 1

    def __init__(self, **values: float) -> None:
        self.schedulables = Schedulables()
        for name, value in values.items():
            self.schedulables.register(Schedulable(name, value))
        self.batches_seen = 0

    def note_values(self, values: Any) -> None: ...

    def __getitem__(self, name: str) -> float:
        return float(self.schedulables[name].value)


class Run(Trained):
    """Trained, walked step by step."""

    def __init__(self, batches: float = 100, max_steps: int = -1, max_epochs: int = -1) -> None:
        super().__init__()
        self.num_training_batches, self.max_steps, self.max_epochs = batches, max_steps, max_epochs
        self.datamodule = SimpleNamespace()


def start(callback: Stages, module: Any, run: Run) -> None:
    callback.setup(run, module, "fit")
    callback.on_train_start(run, module)


def walk(callback: Stages, module: Any, run: Run, steps: int, name: str = "beta", each: int = 1) -> list[float]:
    """The value at the present step and after each batch."""
    found = [module[name]]
    for _ in range(steps):
        run.global_step += each
        module.batches_seen += 1
        callback.on_train_batch_end(run, module)
        found.append(module[name])
    return found


# ---------------------------------------------------------------------- parts


def test_ramps() -> None:
    line, cosine, even = (Ramp(end=4.0, shape=shape) for shape in ("linear", "cosine", "geometric"))
    assert [line.at(1.0, 4.0, done) for done in (0, 0.5, 1.0, 2.0)] == [1.0, 2.5, 4.0, 4.0]
    assert [cosine.at(1.0, 4.0, done) for done in (0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 1.4393398, 2.5, 4.0])
    assert [even.at(1.0, 4.0, done) for done in (0, 0.5, 1.0)] == pytest.approx([1.0, 2.0, 4.0])
    assert even.at(0.0, 4.0, 0.5) == 2.0  # there is no even factor from 0


def test_amounts() -> None:
    assert amount(0.2, 0.1, "beta") == 0.2
    assert amount("x5", 0.01, "lambda1") == pytest.approx(0.05)
    assert amount("x 0.5", 2.0, "lambda1") == 1.0
    assert amount("1e-3", 2.0, "beta") == 1e-3
    for wrong in ("five", "x", None, [1], True):
        with pytest.raises(UserError, match=r"beta is .*; it is a number, or for example x5"):
            amount(wrong, 0.1, "beta")


def test_conditions() -> None:
    above, below = Until(monitor="val/a", above=0.7), Until(monitor="val/a", below=0.2)
    memory = above.watch()
    assert [above.met(value, memory) for value in (0.69, 0.7, 0.8)] == [False, True, True]
    assert [below.met(value, memory) for value in (0.3, 0.2)] == [False, True]
    flat = Until(monitor="val/a", plateau=2, mode="min")
    memory = flat.watch()
    assert [flat.met(value, memory) for value in (0.5, 0.4, 0.4, 0.45)] == [False, False, False, True]


def test_the_first_of_several_lengths_ends_a_stage() -> None:
    config = StageConfig(steps=10, epochs=0.5)
    here = Walk(stage=0, begun=Position(step=100, batches=50))
    assert here.done(config, Position(step=105, batches=52), 20) == pytest.approx(0.5)  # .5 by steps, .2 by epochs
    assert here.over(config, Position(step=104, batches=60), 20)
    assert not here.over(config, Position(step=109, batches=59), 20)


# ---------------------------------------------------------------------- walking


def test_golden_stages() -> None:
    module, run, callback = Module(beta=0.1), Run(), Stages(THREE)
    start(callback, module, run)
    beta = walk(callback, module, run, 400)
    assert [beta[step] for step in (0, 99, 100, 150, 200, 300, 400)] == pytest.approx(
        [0.05, 0.05, 0.05, 0.0875, 0.125, 0.2, 0.2]
    )
    assert run.events == ["stage"] * 3


def test_several_updates_a_batch_change_no_value_of_a_step() -> None:
    """Seven steps a batch: at step 105 the ramp has gone five of its 200 steps."""
    module, run, callback = Module(beta=0.1), Run(), Stages(THREE)
    start(callback, module, run)
    beta = walk(callback, module, run, 50, each=7)
    assert beta[15] == pytest.approx(0.05 + 0.15 * 5 / 200)
    assert beta[43] == 0.2


def test_short_stages_are_walked_through_in_one_batch() -> None:
    given = (("a", 0.1), ("b", 0.2), ("c", 0.3))
    stages: Any = {name: {"steps": 2, "values": {"beta": value}} for name, value in given}
    stages["d"] = {"values": {"beta": {"end": 0.5, "over": 4}}}
    module, run, callback = Module(beta=1.0), Run(), Stages(stages)
    start(callback, module, run)
    assert walk(callback, module, run, 1, each=7) == pytest.approx([0.1, 0.35])  # one step into the ramp from .3
    assert run.events == ["stage"] * 4


def test_factors_multiply_what_a_stage_says() -> None:
    module, run, callback = Module(beta=0.1), Run(), Stages(THREE)
    start(callback, module, run)
    module.schedulables["beta"].scale("plateau", 0.8)
    assert walk(callback, module, run, 200)[200] == pytest.approx(0.1)


def test_a_multiple_of_what_is_configured_and_what_is_not_named_stays() -> None:
    stages = {
        "warm": {"steps": 2, "values": {"lambda1": "x5", "beta": 0.05}},
        "strong": {"steps": 2, "values": {"lambda1": "x1"}},
    }
    module, run, callback = Module(beta=0.1, lambda1=0.01), Run(), Stages(stages)
    start(callback, module, run)
    assert walk(callback, module, run, 4, "lambda1") == pytest.approx([0.05, 0.05, 0.01, 0.01, 0.01])
    assert module["beta"] == 0.05


def test_epochs() -> None:
    """An epoch of 4 batches, half of one, then the rest."""
    stages = {
        "a": {"epochs": 1, "values": {"beta": {"start": 0.2, "end": 0.4}}},
        "b": {"epochs": 0.5, "values": {"beta": 1.0}},
        "c": {"values": {"beta": 2.0}},
    }
    module, run, callback = Module(beta=0.1), Run(batches=4), Stages(stages)
    start(callback, module, run)
    assert walk(callback, module, run, 7) == pytest.approx([0.2, 0.25, 0.3, 0.35, 1.0, 1.0, 2.0, 2.0])


def test_a_condition_ends_a_stage() -> None:
    stages = {
        "a": {"until": {"monitor": "val/acc", "above": 0.7}, "values": {"beta": {"end": 0.4, "over": 4}}},
        "b": {"values": {"beta": {"end": 0.0001, "over": 2}}},
    }
    module, run, callback = Module(beta=0.2), Run(), Stages(stages)
    start(callback, module, run)
    assert walk(callback, module, run, 2) == pytest.approx([0.2, 0.25, 0.3])
    for value, stage in ((0.5, 0), (0.7, 1)):
        run.callback_metrics = {"val/acc": torch.tensor(value)}
        callback.on_validation_end(run, module)
        assert module["stage"] == stage
    assert module["beta"] == pytest.approx(0.3)  # the ramp of b begins where a was left
    assert walk(callback, module, run, 2)[2] == pytest.approx(0.0001)
    run.callback_metrics = {}
    callback.on_validation_end(run, module)  # nothing is watched any more


def test_the_last_ramp_ends_with_the_run() -> None:
    """Steps 2 to 6 of 6; epochs of 3 batches make no difference to max_steps."""
    stages = {"a": {"steps": 2, "values": {"beta": 0.1}}, "b": {"values": {"beta": {"end": 0.5}}}}
    for run in (Run(max_steps=6), Run(batches=3, max_epochs=2), Run(batches=3, max_steps=6, max_epochs=9)):
        module, callback = Module(beta=1.0), Stages(stages)
        start(callback, module, run)
        assert walk(callback, module, run, 6) == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("after", [1, 2, 3, 5, 6])
def test_state(after: int) -> None:
    stages = {
        "a": {"steps": 2, "values": {"beta": {"end": 0.4}}},
        "b": {"steps": 3, "values": {"beta": {"end": 0.1}}},
        "c": {"until": {"monitor": "val/acc", "plateau": 2}, "values": {}},
        "d": {"values": {"beta": 0.7}},
    }

    def checks(callback: Stages, module: Any, run: Run) -> None:
        run.callback_metrics = {"val/acc": torch.tensor(0.5)}
        callback.on_validation_end(run, module)

    def go(callback: Stages, module: Any, run: Run, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found += walk(callback, module, run, 1)[1:]
            checks(callback, module, run)
        return found

    module, run, callback = Module(beta=0.2), Run(), Stages(stages)
    start(callback, module, run)
    whole = go(callback, module, run, 10)
    assert whole[-1] == 0.7
    module, run, callback = Module(beta=0.2), Run(), Stages(stages)
    start(callback, module, run)
    go(callback, module, run, after)
    again, other = Stages(stages), Module(beta=0.2)
    other.batches_seen = module.batches_seen
    again.setup(run, other, "fit")
    other.schedulables.load_state_dict(module.schedulables.state_dict())
    again.load_state_dict(callback.state_dict())
    again.on_train_start(run, other)
    assert go(again, other, run, 10 - after) == whole[after:]


def test_a_resumed_stage_may_name_more() -> None:
    """Two of four steps into it: the new ramp begins where its value is, and has half of the way behind."""
    module, run, callback = Module(beta=0.1, lambda1=0.01), Run(), Stages({"a": {"steps": 4, "values": {"beta": 0.2}}})
    start(callback, module, run)
    walk(callback, module, run, 2)
    again = Stages({"a": {"steps": 4, "values": {"beta": 0.2, "lambda1": {"end": 0.05}}}})
    again.load_state_dict(callback.state_dict())
    other = Module(beta=0.1, lambda1=0.01)
    other.batches_seen = 2
    start(again, other, run)
    assert walk(again, other, run, 2, "lambda1") == pytest.approx([0.03, 0.04, 0.05])


def test_a_checkpoint_of_other_stages() -> None:
    callback = Stages(THREE)
    start(callback, Module(beta=0.1), Run())
    with pytest.raises(UserError, match="stands in stage 'warm', and there are hot, cold; keep its name"):
        Stages({"hot": {"steps": 1}, "cold": {}}).load_state_dict(callback.state_dict())


# ---------------------------------------------------------------------- runs


def dpo(**settings: Any) -> Any:
    return DPO(**({"policy": TINY, "optim": OPTIM, "beta": 0.1} | settings))


def test_values_reach_updates_and_the_log(tmp_path: Path) -> None:
    """Beta and the rate of each update, with a constant schedule and with one that falls."""
    stages = {
        "a": {"steps": 2, "values": {"beta": 0.05, "optim.lr": "x2"}},
        "b": {"steps": 2, "values": {"beta": {"end": 0.2}, "optim.lr": 1e-4}},
    }
    data = FixedData(groups(20, 2), batch_size=4)
    watch, _ = fit(dpo(), tmp_path, data, callbacks=[Stages(stages)])
    assert [row["beta"] for row in watch.updates] == pytest.approx([0.05, 0.05, 0.05, 0.125, 0.2])
    assert [row["lr"] for row in watch.updates] == pytest.approx([2e-3, 2e-3, 1e-4, 1e-4, 1e-4])
    assert [row["schedule/beta"] for row in watch.logged] == pytest.approx([0.05, 0.05, 0.05, 0.125, 0.2])
    assert [row["schedule/stage"] for row in watch.logged] == [0, 0, 1, 1, 1]
    falling = OptimConfig(lr=1e-3, schedule="linear")
    watch, _ = fit(dpo(optim=falling), tmp_path, data, callbacks=[Stages(stages)])
    assert [row["lr"] for row in watch.updates] == pytest.approx([2e-3, 1.6e-3, 0.6e-4, 0.4e-4, 0.2e-4])


def test_stages_that_set_nothing_change_nothing(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Stages({"a": {"steps": 1}, "b": {}})], [Stages({"a": {"values": {"beta": "x1"}}})]):
        module = dpo()
        fit(module, tmp_path, FixedData(groups(8, 2), batch_size=4), callbacks=callbacks)
        found.append(weights(module))
    assert found[0] == found[1] == found[2]


def test_coefficients_of_a_module_that_samples(tmp_path: Path) -> None:
    stages = {
        "a": {"steps": 2, "values": {"kl.coefficient": 0.4, "entropy.coefficient": {"start": 0.2, "end": 0.0}}},
        "b": {"values": {"kl.coefficient": 0.1}},
    }
    module = online(GRPO, kl={"measure": True}, minibatches=2)
    watch, _ = fit(module, tmp_path, FixedData(prompts(12), batch_size=4), callbacks=[Stages(stages)])
    assert [row["kl_coefficient"] for row in watch.logged] == pytest.approx([0.4, 0.1, 0.1])
    assert watch.logged[0]["entropy_coefficient"] == pytest.approx(0.2)
    assert module.entropy.coefficient == 0.0


def test_a_controller_and_stages_cannot_both_set_it(tmp_path: Path) -> None:
    stages = Stages({"a": {"values": {"kl.coefficient": 0.1}}})
    with pytest.raises(UserError, match=r"callbacks\.Stages and kl\.target would both set kl\.coefficient"):
        fit(online(GRPO, kl={"coefficient": 0.1, "target": 1.0}), tmp_path, callbacks=[stages])


def test_a_plateau_on_top_of_a_ramp(tmp_path: Path) -> None:
    """The ramp sets the base, the plateau a factor: .8 from the second epoch's end on (nothing is better by 1)."""
    stages = Stages({"a": {"steps": 4, "values": {"beta": {"start": 0.1, "end": 0.5}}}})
    module = dpo()
    settings = {"max_epochs": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    callbacks = [stages, PlateauBeta(patience=1, min_delta=1.0)]
    watch, _ = fit(module, tmp_path, FixedData(groups(4, 2), batch_size=4), callbacks=callbacks, **settings)
    assert [row["beta"] for row in watch.updates] == pytest.approx([0.1, 0.2, 0.3 * 0.8, 0.4 * 0.64])
    assert module.beta == pytest.approx(0.5 * 0.512)


# ---------------------------------------------------------------------- the curriculum


def preference(folder: Path, **settings: Any) -> PreferenceData:
    given = {"tokenizer": tiny_tokenizer(), "cache_dir": None, "val_fraction": 0.0, "batch_size": 4} | settings
    return PreferenceData(rows(folder), **given)


class Seen(Stages):
    """Which rows each batch holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(sorted(batch.group_index.tolist()))


def test_high_confidence_first_by_margin(tmp_path: Path) -> None:
    """24 rows with margins 0 to 23 and f(s) = .3 + .7 s / 6: batches of 4 out of 8, 10, 13, 16, 19, 22 rows. By then
    each of these has been given, none of the 2 others."""
    callback = Seen({"a": {"values": {"data.fraction": {"start": 0.3, "end": 1.0}}}})
    fit(dpo(), tmp_path, preference(tmp_path), callbacks=[callback])
    in_use = [int(np.ceil(24 * (0.3 + 0.7 * step / 6) - 1e-9)) for step in range(6)]
    assert in_use == [8, 10, 13, 16, 19, 22]
    for found, count in zip(callback.rows, in_use, strict=True):
        assert min(found) >= 24 - count
    assert {row for batch in callback.rows for row in batch} == set(range(2, 24))


def test_the_models_confidence_is_frozen_when_the_stage_begins(tmp_path: Path) -> None:
    """The order of |delta| as the model had it then, not as it has it later."""
    module = dpo(optim=OptimConfig(lr=1e-2, schedule="constant"))
    data = preference(tmp_path)
    taken: list[Any] = []

    class Look(Seen):
        def _freeze(self, trainer: Any, own: Any) -> None:
            from alignment.batches import GroupBatch

            store = data.groups("train")
            taken.append(own.preference_gaps(GroupBatch.from_groups([store[i] for i in range(24)])).abs())
            super()._freeze(trainer, own)

    stages = {"a": {"steps": 2}, "b": {"values": {"data.fraction": 0.25}}}
    callback = Look(stages, confidence="model")
    fit(module, tmp_path, data, callbacks=[callback])
    first = set(taken[0].argsort(descending=True)[:6].tolist())
    assert len(taken) == 1
    assert float(taken[0].max()) > 0
    assert all(set(found) <= first for found in callback.rows[2:])
    np.testing.assert_allclose(data.draws.confidence, taken[0].numpy(), rtol=1e-5)


def test_all_rows_need_no_confidence(tmp_path: Path) -> None:
    callback = Seen({"a": {"values": {"data.fraction": 1.0}}}, confidence="model")
    fit(dpo(), tmp_path, preference(tmp_path), callbacks=[callback])
    assert sorted(row for batch in callback.rows for row in batch) == list(range(24))


def test_confidence_from_a_column_and_a_moving_mix(tmp_path: Path) -> None:
    from datamodules import PromptData
    from tests.unit.test_planned import SMALL

    path = rows(tmp_path, kind="prompts", sure=lambda i: -i)
    strata = {"by": "column", "column": "source", "ratio": {"chat": 1, "code": 1, "math": 1}}
    data = PromptData(path, strata=strata, tokenizer=tiny_tokenizer(), **SMALL)
    stages = {
        "a": {"steps": 1, "mix": {"chat": 1, "code": 0, "math": 0}, "values": {"data.fraction": 0.5}},
        "b": {"mix": {"chat": 0, "math": 2}, "values": {"data.fraction": 1.0}},
    }
    callback = Seen(stages, confidence="sure")
    fit(online(GRPO), tmp_path, data, callbacks=[callback], max_steps=2)
    assert set(callback.rows[0]) == {0, 3, 6, 9}  # four of eight, so that two come twice
    assert {row % 3 for row in callback.rows[1]} == {2}


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({}, "there are no stages"),
        ({"a": {}, "b": {}}, "stage 'a' has no length; give steps, epochs or until"),
        ({"a": {"step": 1}}, "stage 'a' has no field step; it has steps, epochs"),
        ({"a": {"steps": 0}}, "a stage of 0 steps"),
        ({"a": {"epochs": 0.0}}, "0.0 epochs"),
        ({"a": {"until": {"monitor": "val/x"}}}, "until needs one of above, below and plateau"),
        ({"a": {"until": {"monitor": "loss", "above": 1.0}}}, "looks at a metric of validation"),
        ({"a": {"until": {"monitor": "val/x", "above": 1, "when": 2}}}, "until has no field when"),
        ({"a": {"until": {"monitor": "val/x", "plateau": 0}}}, "patience of at least 1"),
        ({"a": {"until": {"monitor": "val/x", "above": float("nan")}}}, "until.above is nan; it is a finite number"),
        ({"a": {"until": {"above": 1.0}}}, "until lacks monitor; it has monitor, above"),
        ({"a": {"values": {"beta": {"start": 1}}}}, "beta lacks end; it has end, start, over, shape"),
        ({"a": {"values": {"beta": {"to": 1}}}}, "beta has no field to; it has end, start, over, shape"),
        ({"a": {"values": {"beta": {"end": 1, "over": 0}}}}, "a ramp over 0 steps"),
        ({"a": {"values": {"beta": {"end": 1, "shape": "step"}}}}, "shape is 'step'"),
        (
            {"a": {"until": {"monitor": "val/x", "above": 1}, "values": {"beta": {"end": 1}}}, "b": {}},
            "stage 'a' ends by a condition; say over how many steps beta ramps",
        ),
    ],
)
def test_stages_that_are_none(stages: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Stages(stages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"beta": 0.0}, "stage 'a': beta is 0.0; it must be above 0"),
        ({"beta": {"end": -1}}, "beta is -1.0"),
        ({"beta": "much"}, "beta is 'much'"),
        ({"betta": 1.0}, r"no value 'betta' to move here; there are optim\.lr, beta; did you mean beta"),
        ({"beta": {"start": 0.0001, "end": 0.0, "shape": "geometric"}}, "beta is 0.0"),
        ({"data.fraction": 1.5}, r"data\.fraction is 1\.5; it is above 0 and at most 1"),
        ({"data.mix.easy": 1.0}, r"no value 'data\.mix\.easy'"),
    ],
)
def test_values_that_are_none(values: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        fit(dpo(), tmp_path, preference(tmp_path), callbacks=[Stages({"a": {"values": values}})])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("confidence", "said"),
    [
        ("model", "in the first stage goes by the model's confidence, and it has none"),
        ("sure", "no training row has a column 'sure'"),
        ("source", "column 'source', given as confidence, holds something else than numbers"),
    ],
)
def test_confidence_that_is_none(confidence: str, said: str, tmp_path: Path) -> None:
    stages = Stages({"a": {"values": {"data.fraction": 0.5}}}, confidence=confidence)
    with pytest.raises(UserError, match=said):
        fit(dpo(), tmp_path, preference(tmp_path), callbacks=[stages])


def test_data_and_modules_that_cannot(tmp_path: Path) -> None:
    stages = {"a": {"values": {"data.fraction": 0.5}}}
    with pytest.raises(UserError, match="a FixedData has no mix or curriculum to move"):
        fit(dpo(), tmp_path, FixedData(groups(8, 2)), callbacks=[Stages(stages)])
    with pytest.raises(UserError, match=r"no value 'beta' to move here; there are optim\.lr"):
        fit(SFT(policy=TINY, optim=OPTIM), tmp_path, FixedData(groups(8, 1)), callbacks=[Stages(THREE)])
    from datamodules import PromptData
    from tests.unit.test_planned import SMALL

    data = PromptData(rows(tmp_path, kind="prompts"), tokenizer=tiny_tokenizer(), **SMALL)
    with pytest.raises(UserError, match="a GRPO has none; give `confidence` the name of a data column"):
        fit(online(GRPO, rewards={"odd": here()}), tmp_path, data, callbacks=[Stages(stages)])


def test_a_run_without_an_end(tmp_path: Path) -> None:
    """Told before the first step, also of a last stage that is far away."""
    for ahead in ({}, {"a": {"steps": 1000}}):
        stages = Stages({**ahead, "b": {"values": {"beta": {"end": 1.0}}}})
        with pytest.raises(UserError, match="a run whose length is unknown; say over how many steps"):
            fit(dpo(), tmp_path, FixedData(groups(8, 2)), callbacks=[stages], max_epochs=-1)


def test_a_factor_from_nothing(tmp_path: Path) -> None:
    """From 0 as configured, to 0, and from the 0 that an earlier stage ends at."""
    ramp = {"end": 0.2, "shape": "geometric"}
    firsts = ({"kl.coefficient": ramp}, {"kl.coefficient": ramp | {"start": 1.0, "end": 0.0}}, {"kl.coefficient": 0.0})
    for first in firsts:
        stages = Stages({"a": {"steps": 1, "values": first}, "b": {"values": {"kl.coefficient": ramp}}})
        with pytest.raises(UserError, match=r"ramps kl\.coefficient from .*; geometric is by a factor, so neither"):
            fit(online(GRPO, kl={"measure": True}), tmp_path, callbacks=[stages])


def test_a_condition_without_validation(tmp_path: Path) -> None:
    """A stage that only a condition ends; with a length besides, or as the last one, it may stand."""
    until = {"monitor": "val/loss", "below": 0.1}
    data = FixedData(groups(8, 2), batch_size=4)
    with pytest.raises(UserError, match="stage 'a' ends by a metric of validation, and this run has no validation"):
        fit(dpo(), tmp_path, data, callbacks=[Stages({"a": {"until": until}, "b": {}})])
    for stages in ({"a": {"until": until, "steps": 1}, "b": {}}, {"a": {"until": until}}):
        fit(dpo(), tmp_path, data, callbacks=[Stages(stages)])


def test_what_did_not_begin_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two steps of a stage of nine; and a run that goes through all."""
    data = FixedData(groups(8, 2), batch_size=4)
    fit(dpo(), tmp_path, data, callbacks=[Stages({"a": {"steps": 1}, "b": {}})])
    assert "training ends" not in caplog.text
    fit(dpo(), tmp_path, data, callbacks=[Stages({"a": {"steps": 9}, "b": {"steps": 1}, "c": {}})])
    assert "training ends in stage 'a'; not begun: b, c" in caplog.text


def test_a_condition_that_is_not_logged(tmp_path: Path) -> None:
    """At the first validation, the sanity check too, also of a later stage's."""
    until = {"until": {"monitor": "val/acc", "above": 0.5}}
    for stages, sanity in (({"a": until, "b": {}}, 0), ({"a": {"steps": 9}, "b": until, "c": {}}, 1)):
        settings = {"callbacks": [Stages(stages)], "limit_val_batches": 1, "num_sanity_val_steps": sanity}
        with pytest.raises(UserError, match=r"Stages watches val/acc, which is not logged; there is val/.*val/loss"):
            fit(dpo(), tmp_path, FixedData(groups(8, 2)), **settings)
