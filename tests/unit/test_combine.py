"""Gradient combinations: [G-GRAD] of ALGORITHMS, the conditions that define each method, torchjd, weights, order."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchjd import aggregation

from alignment.combine import COMBINERS, Combiner, Conflict, min_norm
from alignment.errors import UserError
from alignment.randomness import generator

METHODS = ("gradient_sum", "mgda", "pcgrad", "cagrad", "nash", "gradvac")
GOLDEN = torch.tensor([[1.0, 0.0], [-0.5, 1.0]], dtype=torch.float64)


def combiner(method: str, size: int, **settings: Any) -> Combiner:
    return Combiner(method, settings, [f"r{k}" for k in range(size)])


def coefficients(method: str, gradients: Tensor, weights: list[float] | None = None, **settings: Any) -> Tensor:
    gram = gradients @ gradients.T
    given = torch.ones(len(gram)) if weights is None else torch.tensor(weights)
    return combiner(method, len(gram), **settings)(gram, given, generator(0, "combine"))


def direction(method: str, gradients: Tensor, weights: list[float] | None = None, **settings: Any) -> Tensor:
    return coefficients(method, gradients, weights, **settings) @ gradients


def some(trial: int, *, independent: bool = False) -> Tensor:
    """2 to 5 gradients of lengths between about a tenth and ten, in two to eight dimensions; in every third trial two
    of them are opposed."""
    draw = torch.Generator().manual_seed(trial)
    count = int(torch.randint(2, 6, (1,), generator=draw))
    width = int(torch.randint(count if independent else 2, 9, (1,), generator=draw))
    lengths = 10 ** torch.empty(count, 1, dtype=torch.float64).uniform_(-1, 1, generator=draw)
    gradients = lengths * torch.randn(count, width, generator=draw, dtype=torch.float64)
    if trial % 3 == 0 and not independent:
        gradients[-1] = -2 * gradients[0]
    return gradients


# ---------------------------------------------------------------------- golden values


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("gradient_sum", {}, [0.5, 1.0]),
        ("mgda", {}, [0.307692, 0.461538]),
        ("pcgrad", {}, [0.8, 1.4]),
        ("nash", {"max_norm": None}, [0.743496, 1.203002]),
        # Its length is the square root of 2.
        ("nash", {}, [0.743496 / math.sqrt(2), 1.203002 / math.sqrt(2)]),
        ("cagrad", {"rescale": False}, [0.457889, 0.686834]),
        ("cagrad", {}, [0.366312, 0.549467]),
        ("gradvac", {"target": 0.25}, [0.954919, 1.606559]),
    ],
)
def test_golden_directions(method: str, settings: dict[str, Any], expected: list[float]) -> None:
    """[G-GRAD]."""
    assert direction(method, GOLDEN, **settings).tolist() == pytest.approx(expected, abs=1e-6)


def test_golden_coefficients() -> None:
    assert coefficients("mgda", GOLDEN).tolist() == pytest.approx([0.538462, 0.461538], abs=1e-6)
    assert coefficients("nash", GOLDEN, max_norm=None).tolist() == pytest.approx([1.344997, 1.203002], abs=1e-6)
    cagrad = direction("cagrad", GOLDEN, rescale=False)
    assert (GOLDEN @ cagrad).tolist() == pytest.approx([0.457889] * 2, abs=1e-6)


def test_gradvac_follows_its_moving_average() -> None:
    """The pair's cosine is -0.447214: the targets are 0, then half of it, then three quarters, and a target below the
    cosine turns nothing."""
    gram, method = GOLDEN @ GOLDEN.T, combiner("gradvac", 2)
    draw, ones = generator(0, "combine"), torch.ones(2)
    first = method(gram, ones, draw)
    assert (first @ GOLDEN).tolist() == pytest.approx([0.8, 1.4], abs=1e-9)  # target 0: PCGrad
    cosine = -0.5 / math.sqrt(1.25)
    assert method.memory.tolist() == [pytest.approx([0, cosine / 2]), pytest.approx([cosine / 2, 0])]
    method(gram, ones, draw)
    assert float(method.memory[0, 1]) == pytest.approx(0.75 * cosine)
    aligned = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    assert method(aligned, ones, draw).tolist() == [1, 1]


# ---------------------------------------------------------------------- what defines each method


@pytest.mark.parametrize("trial", range(30))
def test_mgda_is_the_shortest_convex_combination(trial: int) -> None:
    """No corner of the hull lies nearer to the origin along d: g_k.d >= |d|^2 for all k."""
    gradients = some(trial)
    weights = coefficients("mgda", gradients)
    assert float(weights.min()) >= 0
    assert float(weights.sum()) == pytest.approx(1)
    d, largest = weights @ gradients, float((gradients**2).sum(1).max())
    assert float((gradients @ d).min()) >= float(d @ d) - 1e-10 * largest


@pytest.mark.parametrize("trial", range(30))
def test_cagrad_is_the_best_worst_case_in_its_ball(trial: int) -> None:
    """The smallest g_k.d equals the dual's value, g_v.g_0 + c |g_0| |g_v|, so neither can be better."""
    gradients, c = some(trial), 0.4
    found = coefficients("cagrad", gradients, c=c, rescale=False)
    mean, d = gradients.mean(0), found @ gradients
    radius = c * float(mean.norm())
    largest = float((gradients**2).sum(1).max())
    assert float((d - mean).norm()) <= radius * (1 + 1e-6)
    v = found - 1 / len(gradients)
    v = v / v.sum()
    dual = float(v @ gradients @ mean + radius * (v @ gradients).norm())
    assert float((gradients @ d).min()) == pytest.approx(dual, abs=1e-6 * largest)


def test_cagrad_where_combinations_vanish() -> None:
    """g_1 and g_2 are opposed, so d must not move along them: of the ball around g_0 = (-1/3, 10/3) that leaves the
    points (0, y), and the nearest of them."""
    gradients = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    assert direction("cagrad", gradients, rescale=False).tolist() == pytest.approx([0, 10 / 3], abs=1e-5)


def test_cagrad_without_a_radius_is_the_mean() -> None:
    mean = [0.25, 0.5]
    assert direction("cagrad", GOLDEN, c=0.0).tolist() == pytest.approx(mean)
    opposed = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    assert direction("cagrad", opposed).tolist() == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize("trial", range(30))
def test_nash_solves_its_equation(trial: int) -> None:
    gradients = some(trial, independent=True)
    found = coefficients("nash", gradients, max_norm=None)
    assert float(found.min()) > 0
    assert (found * (gradients @ gradients.T @ found)).tolist() == pytest.approx([1] * len(found), abs=1e-9)
    d = direction("nash", 1000 * gradients)
    assert float(d.norm()) == pytest.approx(1)
    torch.testing.assert_close(d, direction("nash", gradients))  # whatever the gradients' unit


def test_nash_without_a_common_direction_stays() -> None:
    opposed = torch.tensor([[1.0, 2.0], [-3.0, -6.0]], dtype=torch.float64)
    assert direction("nash", opposed).tolist() == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_agree_are_left_alone(method: str) -> None:
    """Of two equal gradients every method makes a multiple of them, and pcgrad and gradvac their sum."""
    gradients = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    d = direction(method, gradients)
    assert float(d[0] * 4 - d[1] * 3) == pytest.approx(0, abs=1e-6)
    assert float(d[0]) > 0
    if method in ("gradient_sum", "pcgrad", "gradvac"):
        assert d.tolist() == pytest.approx([6, 8])


# ---------------------------------------------------------------------- torchjd


def unshuffled(count: int, **_: Any) -> Tensor:
    return torch.arange(count)


@pytest.mark.parametrize("trial", range(12))
def test_torchjd(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MGDA, PCGrad and GradVac (over four steps, with what it remembers). Its CAGrad and Nash-MTL need a convex solver
    and are held to their defining conditions above."""
    gradients = some(trial)
    close = {"rtol": 0, "atol": 1e-5 * float(gradients.norm())}
    theirs = aggregation.MGDA(epsilon=1e-12, max_iters=2000)(gradients)
    # Frank-Wolfe comes near only slowly, so lengths are compared.
    assert float(direction("mgda", gradients).norm()) <= float(theirs.norm()) + 1e-9
    torch.testing.assert_close(direction("mgda", gradients), theirs, rtol=0, atol=1e-2 * float(gradients.norm()))
    monkeypatch.setattr(torch, "randperm", unshuffled)
    torch.testing.assert_close(direction("pcgrad", gradients), aggregation.PCGrad()(gradients), **close)
    gradvac, ours = aggregation.GradVac(beta=0.3), combiner("gradvac", len(gradients), beta=0.3)
    for step in range(4):
        now = gradients + 0.3 * some(trial + 100 * step)[:1, :1]
        found = ours(now @ now.T, torch.ones(len(now)), generator(0, "combine"))
        torch.testing.assert_close(found @ now, gradvac(now), **close)


# ---------------------------------------------------------------------- weights, silence, order


def test_weights_are_factors_of_corrected_gradients() -> None:
    """PCGrad makes (.8, .4) and (0, 1) of the golden pair."""
    assert direction("pcgrad", GOLDEN, [2.0, 0.5]).tolist() == pytest.approx([1.6, 1.3])
    assert direction("gradient_sum", GOLDEN, [2.0, 0.5]).tolist() == pytest.approx([1.75, 0.5])


def test_weights_are_rates_of_decrease_in_mgda() -> None:
    d = direction("mgda", GOLDEN, [3.0, 1.0])
    first, second = (GOLDEN @ d).tolist()
    assert first == pytest.approx(3 * second)
    assert direction("mgda", GOLDEN, [6.0, 2.0]).tolist() == pytest.approx(d.tolist())


def test_weights_move_the_centre_of_cagrad_and_the_power_in_nash() -> None:
    assert direction("cagrad", GOLDEN, [3.0, 1.0], c=0.0).tolist() == pytest.approx([0.625, 0.25])
    found = coefficients("nash", GOLDEN, [3.0, 1.0], max_norm=None)
    assert (found * (GOLDEN @ GOLDEN.T @ found)).tolist() == pytest.approx([1.5, 0.5])


def test_mgda_of_unit_gradients() -> None:
    """Orthogonal gradients of lengths 1 and 10: the shorter one gets 100 times the share, or the same."""
    gradients = torch.tensor([[1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    plain = coefficients("mgda", gradients)
    assert float(plain[0] / plain[1]) == pytest.approx(100)
    assert direction("mgda", gradients, normalise=True).tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("method", METHODS)
def test_an_objective_without_gradient_or_weight_is_not_there(method: str) -> None:
    silent = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-0.5, 1.0]], dtype=torch.float64)
    expected = direction(method, GOLDEN)
    found = coefficients(method, silent)
    assert float(found[1]) == 0
    torch.testing.assert_close(found @ silent, expected)
    third = torch.cat([GOLDEN, torch.tensor([[-5.0, -5.0]], dtype=torch.float64)])
    torch.testing.assert_close(direction(method, third, [1.0, 1.0, 0.0]), expected)
    assert coefficients(method, torch.zeros(3, 2, dtype=torch.float64)).tolist() == [0, 0, 0]
    alone = coefficients(method, GOLDEN[:1])
    assert float(alone[0]) > 0


@pytest.mark.parametrize("method", ["pcgrad", "gradvac"])
def test_the_order_is_drawn_from_the_key_alone(method: str) -> None:
    gradients = some(4)[:3]
    assert len(gradients) == 3
    gram = gradients @ gradients.T

    def drawn(key: int) -> list[float]:
        return combiner(method, 3)(gram, torch.ones(3), generator(0, "combine", key)).tolist()

    torch.manual_seed(5)
    runs = [drawn(key) for key in range(20)]
    torch.manual_seed(6)
    assert runs == [drawn(key) for key in range(20)]
    assert len({tuple(run) for run in runs}) > 1
    fixed = [coefficients(method, gradients, shuffle=False).tolist() for _ in range(2)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize("method", ["gradient_sum", "mgda", "cagrad", "nash"])
def test_renaming_objectives_changes_nothing(method: str) -> None:
    gradients, order = some(7), torch.tensor([1, 0])
    pair = gradients[:2]
    torch.testing.assert_close(direction(method, pair, [1.0, 3.0]), direction(method, pair[order], [3.0, 1.0]))


def test_projection_has_a_dead_zone() -> None:
    """The cosine is -0.447: below -0.4, not below -0.5."""
    assert direction("pcgrad", GOLDEN, threshold=0.4).tolist() == pytest.approx([0.8, 1.4])
    assert direction("pcgrad", GOLDEN, threshold=0.5).tolist() == pytest.approx([0.5, 1.0])


# ---------------------------------------------------------------------- nearest points, state, errors


def test_nearest_points_of_dependent_and_repeated_corners() -> None:
    points = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    weights = min_norm(points @ points.T)
    assert (weights @ points).tolist() == pytest.approx([1, 1])
    around = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    assert (min_norm(around @ around.T) @ around).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_state_goes_by_name() -> None:
    """After a reward was added and the others changed places."""
    method = Combiner("gradvac", {}, ["a", "b"])
    method(GOLDEN @ GOLDEN.T, torch.ones(2), generator(0, "combine"))
    state = json.loads(json.dumps(method.state_dict()))
    other = Combiner("gradvac", {}, ["b", "new", "a"])
    other.load_state_dict(state)
    assert float(other.memory[2, 0]) == float(method.memory[0, 1])
    assert float(other.memory[0, 2]) == float(method.memory[1, 0])
    assert other.memory[1].tolist() == [0, 0, 0]


def longest(conflict: Conflict) -> Tensor:
    """A user's own: the longest gradient alone."""
    out = torch.zeros_like(conflict.weights)
    out[conflict.gram.diagonal().argmax()] = 1.0
    return out


def one_too_few(conflict: Conflict) -> Tensor:
    return conflict.weights[1:]


def test_a_method_of_ones_own() -> None:
    assert coefficients("tests.unit.test_combine.longest", GOLDEN).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"returned \(1,\) for 2 objectives"):
        coefficients("tests.unit.test_combine.one_too_few", GOLDEN)


def test_names_and_settings_that_do_not_exist() -> None:
    assert set(METHODS) <= set(COMBINERS)
    with pytest.raises(UserError, match=r"'mgd' is not known, did you mean 'mgda'\?"):
        combiner("mgd", 2)
    with pytest.raises(UserError, match="'cagrad' has no setting radius; it has c, rescale"):
        combiner("cagrad", 2, radius=1.0)
