"""Rules of the doctor over logs made by hand: each sees its fault, and none sees one in what is like it and healthy."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from alignment.diagnosis import Alarm, Examination, ask
from alignment.diagnosis_known import Known
from alignment.diagnosis_rules import NAMES, RULES
from alignment.diagnosis_series import LIMIT, History, Series
from alignment.errors import UserError
from tests.doctor_toys import alarms, examined, line, log, merged, up, with_evaluations

# ---------------------------------------------------------------------- series


def series(*values: float, name: str = "m") -> Series:
    return Series.of(name, range(len(values)), values)


def test_windows_are_a_fifth_within_bounds() -> None:
    assert [series(*[0.0] * n).width for n in (10, 25, 60, 100, 500)] == [5, 5, 12, 20, 20]
    assert [series(*[0.0] * n, name="val/m").width for n in (6, 9, 10)] == [2, 3, 5]
    assert series(0.0, name="ranks/m").width == 1
    ten = series(*range(10))
    assert (ten.first.value, ten.last.value) == (2, 7)
    assert (ten.last.first, ten.last.last) == (5, 9)
    assert ten.window(1) == ten.first
    assert ten.window(2) is None


def test_noise_is_that_between_neighbours() -> None:
    """A trend has none; +1, -1, +1 about a trend differ by 2 from one to the next: 1.4826 * 2 / sqrt(2)."""
    assert series(*range(20)).noise == 0
    assert series(*[i + (-1) ** i for i in range(21)]).noise == pytest.approx(1.4826 * 2 / math.sqrt(2))
    assert series(*[100.0 if i == 7 else 0.0 for i in range(20)]).noise == 0


def test_a_change_is_measured_in_standard_errors_of_medians() -> None:
    """0, 1, 0, 1, ... and from the tenth on 10 more. Of the 20 steps ten are 1, nine -1 and one 9: their median is 1,
    and the median distance from it 1."""
    values = series(*[0.0, 1.0] * 5, *[10.0, 11.0] * 5, 10.0)
    error = 1.4826 / math.sqrt(2) * math.sqrt(math.pi / 2 * (1 / 5 + 1 / 5))
    assert values.change().errors == pytest.approx(10 / error)
    assert values.change().rises
    assert not values.change().falls
    assert series(*[1.0] * 10).change().errors == 0
    assert series(*[1.0] * 5, *[2.0] * 5).change().errors == math.inf


def test_the_best_window_and_what_was_at_a_step() -> None:
    values = series(0, 0, 0, 9, 9, 9, 9, 9, 2, 2, 2, 2)
    assert (values.best.value, values.best.first, values.best.last) == (9, 1, 5)
    assert values.extent == 9
    assert (values.until(7).value, values.until(7).last) == (9, 7)
    assert values.until(0) == values.first


def test_a_history_is_bounded_and_keeps_the_whole_run() -> None:
    history, rows = History(), 4 * LIMIT
    for step in range(rows):
        history.add(step, {"m": float(step), "bad": math.nan})
    found = history.series()["m"]
    assert set(history) == {"m"}
    assert len(found) < LIMIT
    width = rows / 2 // len(found) * 2
    assert found.values[0] == pytest.approx((width - 1) / 2)  # the mean of the first rows
    assert found.values[-1] == pytest.approx(rows - 1 - (width - 1) / 2, abs=width)
    assert np.all(np.diff(found.values) > 0)
    assert found.tail_values.tolist() == list(range(rows - 64, rows))
    again = History()
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for h in (history, again):
        h.add(rows, {"m": 1.0})
    assert again.state_dict() == history.state_dict()


# ---------------------------------------------------------------------- faults and what is like them


def sampled(**curves: Any) -> Any:
    """What a healthy run of a module that samples logs, with these in place of its curves."""
    healthy = {
        "loss": 0.0,
        "grad_norm": 1.0,
        "reward": up(0.3, 0.9),
        "reward_std": line(0.4, 0.2),
        "frac_reward_zero_std": line(0.1, 0.3),
        "entropy": line(1.5, 0.9),
        "kl": line(0.0, 0.3),
        "ratio": 1.0,
        "clip_ratio__region_mean": 0.02,
        "policy__approxkl_avg": 0.002,
        "completions__mean_length": line(40.0, 44.0),
        "completions__max_length": 64.0,
        "completions__clipped_ratio": 0.05,
        "completions__repetition": 0.02,
        "explained_variance": line(0.0, 0.5),
        "loss__value_avg": up(0.5, 0.1),
        "reward_length_slope": 0.0,
    }
    return log(**(healthy | curves))


FAULTS: dict[str, Any] = {
    "reward_hacking": with_evaluations(sampled(), 4, reward=line(0.6, 0.3)),
    "entropy_collapse": sampled(entropy=up(1.5, 0.05), reward=0.3),
    "over_conservative": merged(sampled(reward=0.3), log(noise=1e-6, kl=1e-4)),
    "kl_runaway": sampled(kl=line(0.0, 9.0), reward=lambda t: 0.9 - 1.2 * abs(t - 0.4)),
    "dead_groups": sampled(frac_reward_zero_std=0.9, reward=0.05),
    "clip_saturation": sampled(clip_ratio__region_mean=line(0.1, 0.5), policy__approxkl_avg=line(0.01, 0.2)),
    "length_drift": sampled(completions__mean_length=line(20.0, 60.0), reward=0.3),
    "truncation": sampled(completions__clipped_ratio=0.8, completions__mean_length=58.0),
    "repetition": sampled(completions__repetition=line(0.0, 0.9), entropy=up(1.5, 0.5)),
    "critic_divergence": sampled(explained_variance=line(0.0, -2.0), loss__value_avg=line(0.2, 2.0)),
    "constant_reward": sampled(),
    "reward_never_moves": sampled(),
}
MEAN, STD, ZERO = "rewards__{}__mean", "rewards__{}__std", "adv__zero_std__{}"


def reward(name: str, mean: Any, std: Any, zero: Any = 0.1, noise: float = 0.01) -> Any:
    return log(noise=noise, **{MEAN.format(name): mean, STD.format(name): std, ZERO.format(name): zero})


FAULTS["constant_reward"] = merged(sampled(), reward("kind", 0.5, 0.0, 1.0, noise=0.0), reward("ok", up(0, 1), 0.4))
FAULTS["reward_never_moves"] = merged(sampled(), reward("kind", 0.5, 0.3), reward("ok", up(0, 1), 0.4))
FAULTS["over_conservative_pairs"] = log(noise=1e-4, loss=0.693, kl__data=0.0005, rewards__margins=0.0)
FAULTS["chosen_logp_falls"] = log(
    loss=up(0.7, 0.2), rewards__margins=line(0, 4), rewards__chosen=line(0, -3), kl__data=line(0, 9)
)
FAULTS["data_bound"] = log(loss=1.0, time__data_share=0.6, time__data_seconds=0.4)
FAULTS["ranks_disagree"] = log(noise=0.0, loss=1.0, ranks__parameters_differ=0.5, ranks__grad_norm_spread=0.2)


def spiked(step: int, size: float) -> Any:
    rows = log(loss=1.0, grad_norm=2.0)
    rows[step] = (step, {"loss": 1.0 + size, "grad_norm": 2.0 * (1 + size)})
    return rows


FAULTS["loss_spike"] = spiked(33, 20.0)


def test_every_rule_has_a_fault() -> None:
    assert set(FAULTS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_sees_its_fault(name: str) -> None:
    found = examined(FAULTS[name])
    (alarm,) = [alarm for alarm in found.alarms if alarm.rule == name]
    assert alarm.evidence
    assert alarm.since >= 9
    first = alarm.source.settings[0].key
    for text in (alarm.line(), found.report("this run")):
        assert alarm.says in text
        assert str(alarm.evidence[0]) in text
        assert first in text
    assert "\n" not in alarm.line()
    assert "NAME" not in alarm.line()


CLOSE: dict[str, set[str]] = {
    # A fault seldom comes alone.
    "kl_runaway": {"reward_hacking", "length_drift"},
    "entropy_collapse": {"length_drift"},
    "repetition": {"reward_hacking"},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_not_taken_for_another(name: str) -> None:
    assert alarms(FAULTS[name]) - {name} <= CLOSE.get(name, set())


HEALTHY: dict[str, Any] = {
    "learning": sampled(),
    "evaluated": with_evaluations(sampled(), 4, reward=up(0.4, 0.8)),
    "one bad evaluation": with_evaluations(sampled(), 4, reward=lambda t: 0.3 if 0.4 < t < 0.5 else 0.8),
    "solved: no entropy, no groups that differ": sampled(
        entropy=up(1.5, 0.01), frac_reward_zero_std=up(0.1, 0.99), reward=up(0.2, 1.4), reward_std=up(0.4, 0.0)
    ),
    "a calm model": sampled(entropy=0.2, reward=0.5, kl=0.05),
    "far away, for a reward that rises": sampled(kl=line(0, 3), entropy=line(1.5, 0.7)),
    "a little better, far away and longer": sampled(
        kl=line(0, 3), reward=line(0.3, 0.5), completions__mean_length=line(20, 50)
    ),
    "a reward that needs longer answers": sampled(completions__mean_length=line(20, 60), reward=line(0.1, 0.9)),
    "a critic that begins badly": sampled(explained_variance=lambda t: -1.5 * (1 - t), loss__value_avg=up(0.5, 0.05)),
    "truncated at first": sampled(completions__clipped_ratio=up(0.7, 0.0), completions__mean_length=up(17, 8)),
    "margins by pushing down the rejected": log(
        loss=up(0.7, 0.2), rewards__margins=line(0, 4), rewards__chosen=line(0, -0.8), kl__data=line(0, 2)
    ),
    "a loss that jumps without its gradient": [
        (step, {**row, "loss": 30.0} if step == 33 else row) for step, row in log(loss=1.0, grad_norm=2.0)
    ],
    "the loop's own milliseconds": log(loss=1.0, time__data_share=0.6, time__data_seconds=0.003, noise=1e-4),
    "ranks that agree": log(noise=0.0, loss=1.0, ranks__parameters_differ=0.0, ranks__grad_norm_spread=0.0),
    "two rewards that both move": merged(sampled(), reward("a", up(0, 0.8), 0.3), reward("b", line(0.9, 0.5), 0.2)),
    "a reward at its ceiling": merged(sampled(), reward("a", up(0, 0.8), 0.3), reward("b", 0.99, 0.05, 0.95)),
    "a reward that has become perfect": merged(
        sampled(), reward("a", up(0, 1), up(0.4, 0.0), up(0.1, 1.0)), reward("b", up(0, 1), 0.3)
    ),
    "many tokens clipped, close by": merged(
        sampled(clip_ratio__region_mean=0.25), log(noise=1e-4, policy__approxkl_avg=0.001)
    ),
    "supervised fine-tuning": log(loss=up(3.0, 1.0), grad_norm=1.0, entropy=up(3.0, 0.2)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_seen_in_a_healthy_run(name: str) -> None:
    assert alarms(HEALTHY[name]) == set()


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_no_fault(seed: int) -> None:
    """A short run at rest, with noise of a tenth of its values."""
    draw = np.random.default_rng(seed)
    names = [name for _, row in sampled()[:1] for name in row]
    rows = [(step, {n: 1 + 0.1 * float(draw.normal()) for n in names}) for step in range(60)]
    rows = [(step, row | {"frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.1}) for step, row in rows]
    rows = [
        (s, r | {"completions/repetition": 0.1, "clip_ratio/region_mean": 0.05, "kl": r["kl"] / 10}) for s, r in rows
    ]
    assert alarms(with_evaluations(rows, 5, reward=lambda t: 1 + 0.1 * math.sin(40 * t + seed))) == set()


# ---------------------------------------------------------------------- single rules


def test_hacking_by_length_is_seen_without_a_held_out_reward() -> None:
    """Each token more brings 0.02, lengths go from 20 to 60: 0.8 of the reward is length, and it rises by 0.5 alone."""
    grows = {"completions__mean_length": line(20, 60), "reward": line(0.3, 0.8)}
    assert "reward_hacking" in alarms(sampled(**grows, reward_length_slope=0.02))
    assert "reward_hacking" not in alarms(sampled(**grows, reward_length_slope=0.0))


def test_hacking_by_repetition() -> None:
    assert "reward_hacking" in alarms(sampled(completions__repetition=up(0.0, 0.9)))


def test_a_held_out_reward_is_one_that_the_run_names() -> None:
    rows = merged(sampled(), reward("truth", line(0.5, 0.1), 0.3))
    assert "reward_hacking" not in alarms(rows)
    assert "reward_hacking" in alarms(rows, held_out=("rewards/truth/mean",))
    assert "reward_hacking" not in alarms(rows, held_out=("rewards/other/mean",))


def test_where_a_run_logs_one_metric_two_windows_are_asked() -> None:
    clipped = [
        (s, {k: v for k, v in row.items() if k != "policy/approxkl_avg"}) for s, row in FAULTS["clip_saturation"]
    ]
    assert "clip_saturation" in alarms(clipped)
    late = log(clip_ratio__region_mean=lambda t: 0.0 if t < 0.87 else 0.5, loss=0.0)
    assert "clip_saturation" not in alarms(late)
    critic = [(s, {k: v for k, v in r.items() if k != "explained_variance"}) for s, r in FAULTS["critic_divergence"]]
    assert "critic_divergence" in alarms(critic)


def test_a_spike_is_told_once_and_is_over_later() -> None:
    rows = spiked(33, 20.0) + [(40 + s, row) for s, row in log(rows=40, loss=1.0, grad_norm=2.0)]
    (alarm,) = examined(rows).alarms
    assert (alarm.rule, alarm.since, alarm.until) == ("loss_spike", 39, 59)
    assert [e.metric for e in alarm.evidence] == ["loss", "grad_norm"]
    assert alarm.evidence[0].last == 33
    assert alarm.evidence[0].after == pytest.approx(21.0)


def test_a_rule_that_lacks_something_says_so() -> None:
    rows = [(s, {"loss": row["loss"], "reward": row["reward"]}) for s, row in sampled()[:12]]
    text = examined(rows).report("this run")
    assert text.startswith("this run: 12 training rows, steps 0 to 11: no alarm\n")
    assert "critic_divergence        explained_variance" in text
    assert "over_conservative        kl; ratio; 30 rows of reward" in text
    short = examined(rows[:4]).report("this run")
    assert "10 rows of reward" in short


def test_evidence_by_hand() -> None:
    """Ten rows: the median of the first five (3 + 2), that of the last five (3 + 7), and their steps."""
    rows = [(10 * i, {"kl": 3.0 + i, "reward": 0.5, "entropy": 1.0 - 0.099 * i}) for i in range(10)]
    seen, lacks = ask(next(rule for rule in RULES if rule.name == "kl_runaway"), Known(known(rows)))
    assert lacks == ()
    assert [str(evidence) for evidence in seen] == [
        "kl 5 -> 10 (steps 0 to 90)",
        "reward 0.5 -> 0.5 (steps 0 to 90)",
    ]


def known(rows: Any) -> dict[str, Series]:
    history = History()
    for step, values in rows:
        history.add(step, values)
    return history.series()


# ---------------------------------------------------------------------- examinations


def test_looks_and_ends() -> None:
    """A fault that comes and goes: one alarm, with its end; what is still seen has none."""
    rows = log(rows=60, loss=1.0, time__data_share=lambda t: 0.8 if t < 0.5 else 0.0, time__data_seconds=0.4)
    examination, begun = Examination(every=5), []
    for step, values in rows:
        begun += examination.add(step, values)
    (alarm,) = begun
    assert alarm.since == 9
    (kept,) = examination.alarms
    assert kept.until is not None
    assert 30 < kept.until < 60
    assert examination.current == []


def test_an_examination_goes_on_where_it_was() -> None:
    rows = with_evaluations(FAULTS["kl_runaway"], 4, reward=line(0.6, 0.3))
    whole, part, again = examined(rows), Examination(), Examination()
    for step, values in rows[:23]:
        part.add(step, values)
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    for step, values in rows[23:]:
        again.add(step, values)
    again.finish()
    assert again.state_dict() == whole.state_dict()
    assert again.alarms
    assert Alarm.of(json.loads(json.dumps(again.alarms[0].state_dict()))) == again.alarms[0]


def test_what_is_logged_beside_training_is_no_row() -> None:
    examination = Examination(every=1)
    for values in ({"epoch": 0.0}, {"lr-AdamW/matrices": 1e-3}, {"event/stage": 1.0}, {"doctor/truncation": 1.0}):
        assert examination.add(3, values) == []
    assert (examination.rows, list(examination.history)) == (0, [])
    examination.add(3, {"val/reward": 1.0})
    assert (examination.rows, list(examination.history)) == (0, ["val/reward"])


def test_a_bad_interval() -> None:
    with pytest.raises(UserError, match="every is 0"):
        Examination(every=0)
