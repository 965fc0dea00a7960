"""MORL: gradients against those of GRPO runs with one reward each, scores against GRPO and PPO, credit by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.actor_critic import ADVANTAGES, RETURNS, VALUES, place
from alignment.batches import Group, GroupBatch
from alignment.components import REST
from alignment.errors import UserError
from alignment.experience import ADVANTAGE, TRUNCATED, table_of
from alignment.memory import Plan, estimate
from alignment.objective import OLD_LOGPS
from alignment.optim import OptimConfig
from alignment.preferences import PREFERENCE
from alignment.rollout import SAMPLER_LOGPS
from alignment.several import SIGNAL
from alignment.update import Counts
from modules import GRPO, MORL, PPO
from tests.rl_toys import SaidBefore, Watch, fit, here, moved, odd, odd_in_some, online, prompts
from tests.toys import TINY, FixedData, trainer

NAN = float("nan")
SGD = OptimConfig(lr=1e-3, optimizer="sgd", schedule="constant", clip_norm=None)


def low(completion: str, completion_ids: list[int]) -> float:
    """Share of ids below 60."""
    return sum(i < 60 for i in completion_ids) / max(1, len(completion_ids))


REWARDS = {"odd": here(odd), "low": here(low, weight=0.5)}


def first(kind: Any, folder: Path, **settings: Any) -> Watch:
    """One update of four prompts, all kinds of module from the same rollout."""
    module = moved(online(kind, **{"optim": SGD, **settings}))
    return fit(module, folder, FixedData(prompts(4), batch_size=4))[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Gradients of GRPO with one reward, of weight 1: the advantage does not know its unit."""
    folder = tmp_path_factory.mktemp("single")
    rewards = {"odd": here(odd), "low": here(low)}
    return {name: first(GRPO, folder, rewards={name: spec}).gradients[0] for name, spec in rewards.items()}


# ---------------------------------------------------------------------- gradients


def by_hand(method: str, a: Tensor, b: Tensor) -> Tensor:
    """Of gradients a and b with weights 1 and 1/2, in float64."""
    a, b = a.double(), b.double()
    if method == "gradient_sum":
        return a + b / 2
    if method == "pcgrad":
        a2 = a - min(0.0, float(a @ b)) / (b @ b) * b
        b2 = b - min(0.0, float(a @ b)) / (a @ a) * a
        return a2 + b2 / 2
    if method == "mgda":  # of a / (4/3) and b / (2/3): weights relative to their mean
        a, b = a * 3 / 4, b * 3 / 2
        share = float(((b - a) @ b) / ((a - b) @ (a - b)))
        share = min(1.0, max(0.0, share))
        return share * a + (1 - share) * b
    raise AssertionError(method)


@pytest.mark.parametrize("method", ["gradient_sum", "pcgrad", "mgda"])
def test_gradients_of_one_reward_each_are_combined(method: str, single: dict[str, Tensor], tmp_path: Path) -> None:
    """Rewards with the same completions as in the runs of GRPO; not one parameter's worth of difference."""
    watch = first(MORL, tmp_path, rewards=REWARDS, combine=method)
    expected = by_hand(method, single["odd"], single["low"])
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(watch.gradients[0].double(), expected, rtol=1e-4, atol=1e-7)
    now = watch.updates[0]
    assert now["grad_norm/odd"] == pytest.approx(float(single["odd"].double().norm()), rel=1e-5)
    assert now["grad_norm/low"] == pytest.approx(float(single["low"].double().norm()), rel=1e-5)
    cosine = float(torch.nn.functional.cosine_similarity(single["odd"].double(), single["low"].double(), dim=0))
    assert now["grad/cos/odd/low"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("method", ["cagrad", "nash", "gradvac"])
def test_the_others_run(method: str, single: dict[str, Tensor], tmp_path: Path) -> None:
    """Their formulas are tested with `alignment.combine`: here, that coefficients reach the gradient."""
    watch = first(MORL, tmp_path, rewards=REWARDS, combine=method)
    now = watch.updates[0]
    expected = now["grad/weight/odd"] * single["odd"] + now["grad/weight/low"] * single["low"]
    torch.testing.assert_close(watch.gradients[0], expected, rtol=1e-4, atol=1e-6)
    if method == "nash":
        assert now["grad_norm"] == pytest.approx(1, abs=1e-5)


def test_penalties_are_added_after_combining(single: dict[str, Tensor], tmp_path: Path) -> None:
    """The gradient of a KL in the loss is what it is in GRPO, whatever is made of the rewards'."""
    kl = {"coefficient": 0.5, "estimator": "k3"}
    with_kl = first(MORL, tmp_path, rewards=REWARDS, kl=kl).gradients[0]
    without = by_hand("mgda", single["odd"], single["low"])
    plain = first(GRPO, tmp_path, rewards={"odd": here(odd)}, kl=kl).gradients[0] - single["odd"]
    assert float(plain.norm()) > 1e-3
    torch.testing.assert_close(with_kl.double() - without, plain.double(), rtol=1e-3, atol=1e-6)


def test_a_reward_that_never_differs_stops_nothing(single: dict[str, Tensor], tmp_path: Path) -> None:
    """Its gradient is exactly 0; the others go on as if it were not there."""
    rewards = {"odd": here(odd), "same": here(lambda completion: 0.3)}
    watch = first(MORL, tmp_path, rewards=rewards)
    torch.testing.assert_close(watch.gradients[0], single["odd"], rtol=1e-5, atol=1e-8)
    assert watch.updates[0]["grad_norm/same"] == 0
    assert "grad/cos/odd/same" not in watch.updates[0]


def test_a_reward_of_weight_0_is_only_watched(single: dict[str, Tensor], tmp_path: Path) -> None:
    watch = first(MORL, tmp_path, rewards={"odd": here(odd), "low": here(low, weight=0.0)})
    torch.testing.assert_close(watch.gradients[0], single["odd"], rtol=1e-5, atol=1e-8)
    assert "grad_norm/low" not in watch.updates[0]
    assert 0 < watch.logged[0]["rewards/low/mean"] < 1


# ---------------------------------------------------------------------- one score


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GRPO, {}),
        (GRPO, {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}, "epochs": 2, "loss": "gspo"}),
        (PPO, {"completions": 2, "epochs": 2, "minibatches": 2, "critic": {"kind": "head"}}),
    ],
    ids=["grpo", "grpo with KL", "ppo"],
)
def test_the_weighted_sum_is_grpo_and_ppo(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    if kind is PPO:
        settings = {**settings, "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"}}
    theirs = first(kind, tmp_path, rewards=REWARDS, **settings)
    ours = first(MORL, tmp_path, rewards=REWARDS, scalarise="weighted_sum", **settings)
    assert len(ours.gradients) == len(theirs.gradients)
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(ours.updates + ours.logged, theirs.updates + theirs.logged, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


def given(rewards: list[list[float]], columns: list[dict[str, Any]] | None = None, lengths: int = 2) -> GroupBatch:
    """Groups of two completions with these rewards a and b."""
    columns = columns or [{}] * (len(rewards) // 2)
    batch = GroupBatch.from_groups([Group(prompt=[1], completions=[[5] * lengths] * 2, columns=c) for c in columns])
    values = torch.tensor(rewards)
    rows = {"reward/a": values[:, 0], "reward/b": values[:, 1], TRUNCATED: torch.zeros(len(rewards))}
    nothing = torch.zeros(len(batch.completion_ids))
    return batch.with_rows(**rows).with_tokens(**{SAMPLER_LOGPS: nothing, OLD_LOGPS: nothing})


def two(**settings: Any) -> Any:
    weights = settings.pop("weights", (1.0, 0.5))
    rewards = {name: here(odd, weight=w) for name, w in zip("ab", weights, strict=True)}
    return online(MORL, **{"rewards": rewards, "advantage": "none", "completions": 2, **settings})


def credited(module: Any, batch: GroupBatch) -> GroupBatch:
    out: GroupBatch = module.credit(batch, table_of(batch, module.suite.names, module.suite.weights))
    return out


def test_chebyshev_scores_reach_the_advantages() -> None:
    """Ideal (1, 4): shortfalls (0, 2) and (1, 0), so scores -2 and -1, and advantages half their difference; the
    weighted sum would have it the other way round for the ideal's sake, 1 against 2."""
    batch = given([[1.0, 0.0], [0.0, 4.0]])
    out = credited(two(scalarise="chebyshev"), batch)
    assert out.rows[ADVANTAGE].tolist() == [-0.5, 0.5]
    assert out.tokens[ADVANTAGES].tolist() == [-0.5, -0.5, 0.5, 0.5]
    out = credited(two(scalarise="chebyshev", weights=(3.0, 0.5)), batch)  # shortfalls (0, 2) and (3, 0)
    assert out.rows[ADVANTAGE].tolist() == [0.5, -0.5]
    given_ideal = credited(two(scalarise="chebyshev", ideal={"a": 5.0, "b": 4.0}), batch)  # (4, 2) and (5, 0)
    assert given_ideal.rows[ADVANTAGE].tolist() == [0.5, -0.5]


# ---------------------------------------------------------------------- credit by hand


def test_each_reward_has_advantages_of_its_own() -> None:
    """Rewards (1, 0) and (0, 4), centred: +-1/2 and -+2. With weights 1 and 1/2 they sum to -+1/2, and the completions
    have something to teach also where that sum is 0."""
    out = credited(two(), given([[1.0, 0.0], [0.0, 4.0], [1.0, 0.0], [0.0, 2.0]]))
    assert out.tokens[place(ADVANTAGES, "a")].tolist() == [0.5, 0.5, -0.5, -0.5] * 2
    assert out.tokens[place(ADVANTAGES, "b")].tolist() == [-2, -2, 2, 2, -1, -1, 1, 1]
    assert out.rows[ADVANTAGE].tolist() == [-0.5, 0.5, 0, 0]
    assert out.rows[SIGNAL].tolist() == [1.5, 1.5, 1, 1]


def test_abstentions_are_of_one_reward() -> None:
    """Group one: b applies to one completion only and gives nothing. Group two: one completion has no reward at all."""
    out = credited(two(), given([[1.0, NAN], [0.0, 4.0], [NAN, NAN], [1.0, 2.0]]))
    assert out.tokens[place(ADVANTAGES, "a")].tolist() == [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0]
    assert not out.tokens[place(ADVANTAGES, "b")].any()
    assert out.scored.tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_preferences_multiply_advantages() -> None:
    """Shares (.25, .75) of two rewards: factors .5 and 1.5."""
    batch = given([[1.0, 0.0], [0.0, 4.0]], [{PREFERENCE: {"a": 0.25, "b": 0.75}}])
    out = credited(two(preferences={}), batch)
    assert out.tokens[place(ADVANTAGES, "a")].tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert out.tokens[place(ADVANTAGES, "b")].tolist() == pytest.approx([-3, -3, 3, 3])
    assert out.rows[ADVANTAGE].tolist() == pytest.approx([0.25 - 1.5, 1.5 - 0.25])
    out = credited(two(preferences={}, scalarise="weighted_sum"), batch)  # scores .5 and .75 * 4 = 3
    assert out.rows[ADVANTAGE].tolist() == pytest.approx([-1.25, 1.25])


class Values:
    """A critic with given values [C, 2]."""

    shares_trunk = False

    def __init__(self, values: list[list[float]]) -> None:
        self.values = torch.tensor(values).requires_grad_()

    def __call__(self, batch: GroupBatch, states: Tensor | None) -> Tensor:
        return self.values


def test_each_reward_has_values_of_its_own() -> None:
    """Completions of two tokens, gamma and lambda 1: A_t = R - V_t, R the reward. b abstains on the second completion,
    whose values of b then learn nothing. The value loss is (.8^2 + .9^2 + .2^2 + .1^2 + 2 (4 - 1)^2) / 2 over 4
    tokens, times .1."""
    settings: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "value_clip": None}
    module = two(critic={"kind": "head"}, **settings)
    old = [[0.2, 1.0], [0.1, 1.0], [0.2, 1.0], [0.1, 1.0]]
    names = {place(VALUES, name): torch.tensor(old)[:, k] for k, name in enumerate("ab")}
    out = credited(module, given([[1.0, 4.0], [0.0, NAN]]).with_tokens(**names))
    assert out.tokens[place(ADVANTAGES, "a")].tolist() == pytest.approx([0.8, 0.9, -0.2, -0.1])
    assert out.tokens[place(ADVANTAGES, "b")].tolist() == pytest.approx([3, 3, 0, 0])
    assert out.tokens[place(RETURNS, "b")][:2].tolist() == [4, 4]
    module.engine, module.critic = SaidBefore(torch.zeros(4)), Values(old)
    shares, metrics = module.parts(out, Counts(prompts=1, rows=2, tokens=4))
    assert list(shares) == ["a", "b", REST]
    assert float(shares["a"].detach()) == pytest.approx(-1.4 / 4)
    assert float(shares["b"].detach()) == pytest.approx(-6 / 4)
    assert float(shares[REST].detach()) == pytest.approx(0.1 * (0.64 + 0.81 + 0.04 + 0.01 + 18) / 2 / 4)
    shares[REST].backward()
    assert module.critic.values.grad[2:, 1].tolist() == [0, 0]
    assert module.critic.values.grad[:, 0].abs().min() > 0
    assert math.isfinite(float(metrics["loss/value_avg"][0]))


def test_token_advantages_are_whitened_by_reward() -> None:
    out = credited(two(critic={"kind": "head"}), given([[1.0, 10.0], [0.0, 30.0]]))
    for name in "ab":
        values = out.tokens[place(ADVANTAGES, name)]
        assert float(values.mean()) == pytest.approx(0, abs=1e-6)
        assert float(values.std()) == pytest.approx(1, abs=1e-4)


# ---------------------------------------------------------------------- updates

VARIANTS: dict[str, dict[str, Any]] = {
    "mgda": {"epochs": 2},
    "critic, KL, two minibatches": {
        "combine": "cagrad",
        "critic": {"kind": "copy"},
        "minibatches": 2,
        "kl": {"coefficient": 0.1},
        "entropy": {"coefficient": 0.01},
    },
    "chebyshev, preferences": {"scalarise": "smooth_chebyshev", "preferences": {}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_change_nothing(name: str, tmp_path: Path) -> None:
    """C1: gradients and metrics, also where a prompt alone is over the bound."""
    runs = [
        fit(online(MORL, rewards=REWARDS, optim=SGD, micro_batch_tokens=bound, **VARIANTS[name]), tmp_path)[0]
        for bound in (None, 30, 1)
    ]
    whole = runs[0]
    assert float(whole.gradients[0].norm()) > 1e-3
    for split in runs[1:]:
        for a, b in zip(split.gradients, whole.gradients, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)
        for a, b in zip(split.updates + split.logged, whole.updates + whole.logged, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5, nan_ok=True)


def test_skipping_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the prompts give no signal from either reward."""
    rewards = {"odd": here(odd_in_some), "less": here(odd_in_some, weight=0.5)}
    runs, read = [], []
    for skips in (True, False):
        module = online(MORL, rewards=rewards, optim=SGD, epochs=2, combine="pcgrad")
        assert module.skips
        monkeypatch.setattr(MORL, "skips", skips)
        parts, seen = module.parts, []

        def counted(micro: GroupBatch, counts: Counts, parts: Any = parts, seen: list[int] = seen) -> Any:
            seen.append(micro.num_completions)
            return parts(micro, counts)

        module.parts = counted
        data = FixedData(prompts(8, alive=[True, False] * 4), batch_size=4)
        runs.append(fit(module, tmp_path, data)[0])
        read.append(sum(seen))
        monkeypatch.undo()
    for a, b in zip(runs[0].gradients, runs[1].gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)
    assert read[0] <= read[1] / 2
    assert not online(MORL, rewards=rewards, kl={"coefficient": 0.1}).skips
    assert not online(MORL, rewards=rewards, critic={"kind": "head"}).skips


def test_what_was_preferred_is_read_and_asked_for(tmp_path: Path) -> None:
    """In training every prompt has a preference of its own, in evaluation all have the one that was given."""
    asked: list[str] = []

    def noted(prompts: list[str], completions: list[str], preference: list[dict[str, float]]) -> list[float]:
        asked.extend(prompts)
        return [share["odd"] for share in preference]

    rewards = {"odd": here(odd), "low": here(low), "noted": here(noted, weight=0.0)}
    evaluation = {"odd": 0.7, "low": 0.3}
    module = online(MORL, rewards=rewards, preferences={"evaluation": evaluation})
    fit(module, tmp_path, max_steps=2)
    assert len(asked) == 2 * 4 * 4
    heads = [text[text.index("[") : text.index("] ") + 1] for text in asked]
    assert len(set(heads)) > 3
    assert all(len(set(heads[i : i + 4])) == 1 for i in range(0, len(heads), 4))
    rows = trainer(tmp_path).predict(module, datamodule=FixedData(prompts(2), batch_size=2))[0]  # type: ignore[index]
    assert all("[odd 0.7, low 0.3, noted 0.0] " in row["prompt"] for row in rows)
    assert [row["rewards"]["noted"] for row in rows] == pytest.approx([0.7, 0.7])


# ---------------------------------------------------------------------- settings


def test_memory_counts_the_gradients_that_are_kept() -> None:
    one, three = (estimate(Plan(policy=TINY, gradients=n)) for n in (1, 3))
    assert three.gradients == 3 * one.gradients
    assert three.total - one.total == 2 * one.gradients


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"combine": "mgd"}, "gradient combination 'mgd' is not known, did you mean 'mgda'?"),
        ({"combine": "pcgrad", "method_args": {"c": 1}}, "'pcgrad' has no setting c"),
        ({"scalarise": "chebishev"}, "scalarisation 'chebishev' is not known, did you mean 'chebyshev'?"),
        ({"combine": "mgda", "scalarise": "chebyshev"}, "one score has one gradient, so give one"),
        ({"ideal": {"a": 1.0}}, "ideal goes with scalarise"),
        ({"scalarise": "chebyshev", "ideal": {"c": 1.0}}, "ideal names c, no reward; there are a, b"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}, "set kl.place to loss, or scalarise"),
        ({"weights": (1.0, -1.0)}, "rewards have weights a 1, b -1; each must be at least 0"),
        ({"weights": (0.0, 0.0)}, "and one above"),
        ({"gamma": 2.0}, "gamma is 2.0"),
        ({"preferences": {"evaluation": {"a": 0.5}}}, "sum to 1"),
    ],
)
def test_mistakes_are_told_in_one_line(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError) as caught:
        two(**settings)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reward_model_gives_one_value(tmp_path: Path) -> None:
    module = two(critic={"kind": "reward_model", "reward_model": str(tmp_path)})
    with pytest.raises(UserError, match=r"gives 1 value, not 2; use critic\.kind head or copy"):
        module.configure_model()
