"""The preference family against [G-DPO] and values derived by hand; mixes, f-divergences, WPO; what does not go
together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alignment.checkpoint import SafeCheckpointIO
from alignment.divergences import score
from alignment.errors import UserError
from alignment.losses import DPO_LOSSES, PairLogRatios
from alignment.pair_objective import PairObjective
from alignment.stages import StageConfig
from callbacks import Stages
from modules import DPO, GeneralizedRPO
from tests.rl_toys import fit
from tests.toys import OPTIM, TINY, FixedData, groups

# c, j and lengths of [G-DPO]; delta is 1.5, 1.3, -1.4.
CHOSEN, REJECTED, DELTA = (1.0, 0.5, -1.0), (-0.5, -0.8, 0.4), (1.5, 1.3, -1.4)
LENGTHS = (5, 8, 3), (6, 4, 3)
NLL = (10.0, 20.0, 15.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def golden(**more: Any) -> PairLogRatios:
    return PairLogRatios(
        **{
            "chosen": tensor(*CHOSEN),
            "rejected": tensor(*REJECTED),
            "chosen_tokens": tensor(*LENGTHS[0]),
            "rejected_tokens": tensor(*LENGTHS[1]),
            **more,
        }
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def informed(pairs: PairLogRatios, objective: PairObjective, weights: Tensor | None = None) -> PairLogRatios:
    """The pairs as one whole batch."""
    weights = torch.ones_like(pairs.chosen) if weights is None else weights
    return replace(pairs, whole=objective.whole(pairs.detached(), weights, 0.1, {}, True))


@pytest.mark.parametrize(
    ("name", "per_pair", "mean"),
    [
        ("bco_pair", (1.312856, 1.322407, 1.457744), 1.364336),
        ("nca", (1.350825, 1.354663, 1.423269), 1.376252),
        ("apo_zero", (0.962523, 0.967513, 1.034978), 0.988338),
        ("sppo_hard", (36.25, 37.89, 65.16), 46.433333),
        ("exo", (2.505517, 2.539185, 3.005017), 2.683239),
    ],
)
def test_golden_values(name: str, per_pair: tuple[float, ...], mean: float) -> None:
    found = PairObjective(name)(golden(), 0.1, 0.0)
    assert found.tolist() == pytest.approx(per_pair, abs=1e-6)
    assert float(found.mean()) == pytest.approx(mean, abs=1e-6)


def test_exo_smoothing_is_its_epsilon() -> None:
    """At delta 0 and e = 1/4: KL([1/2, 1/2] || [3/4, 1/4]) = -log(3/4 * 1/4) / 2 - log 2."""
    found = PairObjective("exo", label_smoothing=0.25)(
        golden(chosen=tensor(0, 0, 0), rejected=tensor(0, 0, 0)), 0.1, 0.25
    )
    assert found.tolist() == pytest.approx([-math.log(3 / 16) / 2 - math.log(2)] * 3)


def test_apo_down_by_hand() -> None:
    expected = [sigmoid(0.1 * c) + 1 - sigmoid(0.1 * d) for c, d in zip(CHOSEN, DELTA, strict=True)]
    assert PairObjective("apo_down")(golden(), 0.1, 0.0).tolist() == pytest.approx(expected)
    # c = 0.1, delta = 0.15: 0.524979 + 0.462570.
    assert expected[0] == pytest.approx(0.987549, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    # At delta = 0 both parts count half: (log 2 + 1) / 2. At x = 0.15 and tau 0.05 the modulation is sigmoid(3):
    # 0.0474259 * 0.6209570 + 0.9525741 * 0.8607080; at tau 0.15 it is sigmoid(1).
    [({}, 0.8493383), ({"tau": 0.15}, 0.2689414 * 0.6209570 + 0.7310586 * 0.8607080)],
)
def test_discopop_by_hand(settings: dict[str, float], expected: float) -> None:
    objective = PairObjective("discopop", settings)
    zero = objective(golden(chosen=tensor(0, 0, 0), rejected=tensor(0, 0, 0)), 0.1, 0.0)
    assert zero.tolist() == pytest.approx([(math.log(2) + 1) / 2] * 3)
    assert float(objective(golden(), 0.1, 0.0)[0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("tau", "rises"), [(0.05, True), (0.11, False)])
def test_where_discopop_rises(tau: float, rises: bool) -> None:
    """docs/preferences.md says so: between -0.12 and 0.07 with the paper's tau, nowhere from 0.11 on."""
    x = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64, requires_grad=True)
    one = torch.ones_like(x)
    pairs = PairLogRatios(chosen=x, rejected=0 * one, chosen_tokens=one, rejected_tokens=one)
    (slope,) = torch.autograd.grad(PairObjective("discopop", {"tau": tau})(pairs, 1.0, 0.0).sum(), x)
    up = x.detach()[slope > 0]
    assert [round(float(v), 2) for v in (up.min(), up.max())] == [-0.12, 0.07] if rises else len(up) == 0


def test_discopop_stays_finite_and_keeps_its_slope() -> None:
    """x = -3,000, where e^3000 is infinite in every format."""
    chosen = torch.tensor([-30_000.0], requires_grad=True)
    one = torch.ones(1)
    pairs = PairLogRatios(chosen=chosen, rejected=0 * one, chosen_tokens=one, rejected_tokens=one)
    loss = PairObjective("discopop")(pairs, 0.1, 0.0)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()


@pytest.mark.parametrize(
    ("name", "chosen", "rejected"),
    # Slopes at c = j = 0 for beta 0.1, by hand.
    [
        ("exo", -0.1 / 4 * math.log(999), 0.1 / 4 * math.log(999)),
        ("nca", -0.1 / 2 + 0.1 / 4, 0.1 / 4),
        ("bco_pair", -0.05, 0.05),
        ("bco", -0.05, 0.05),
        ("sppo_hard", -10.0, 10.0),
        ("apo_zero", -0.025, 0.025),
        ("apo_down", 0.025 - 0.025, 0.025),
        # Half of each slope, -1/2 and -1, and the modulation's own, (1 - log 2) / (4 tau).
        ("discopop", 0.1 * (-0.75 + (1 - math.log(2)) / 0.2), -0.1 * (-0.75 + (1 - math.log(2)) / 0.2)),
        ("aot", -0.05, 0.05),
        ("aot_unpaired", -0.05, 0.05),
    ],
)
def test_slopes_at_the_start(name: str, chosen: float, rejected: float) -> None:
    zeros = tensor(0), tensor(0)
    for side in zeros:
        side.requires_grad_()
    one, objective = tensor(1), PairObjective(name)
    pairs = PairLogRatios(
        chosen=zeros[0], rejected=zeros[1], chosen_tokens=one, rejected_tokens=one, reference_delta=tensor(0)
    )
    objective(informed(pairs, objective), 0.1, 0.0).sum().backward()
    slopes = [float(side.grad) for side in zeros if side.grad is not None]
    assert slopes == pytest.approx([chosen, rejected], abs=1e-12)


# ---------------------------------------------------------------------- without a reference

# Sums -10, -20, -15 and -12, -19, -9: means -2, -2.5, -5 and -2, -4.75, -3.
SUMS = {"chosen": tensor(-10, -20, -15), "rejected": tensor(-12, -19, -9)}


def test_simpo_by_hand() -> None:
    """beta 2, gamma 0.5: logits -0.5, 4, -4.5."""
    found = PairObjective("simpo", reference=False)(golden(**SUMS), 2.0, 0.0)
    assert found.tolist() == pytest.approx([0.974077, 0.018150, 4.511048], abs=1e-6)
    wider = PairObjective("simpo", {"gamma": 1.0}, reference=False)(golden(**SUMS), 2.0, 0.0)
    assert wider.tolist() == pytest.approx([softplus(1.0), softplus(-3.5), softplus(5.0)])


def test_orpo_by_hand() -> None:
    """Odds p / (1 - p) of e^-2, e^-2.5, e^-5 and of e^-2, e^-4.75, e^-3, where lambda is 0.1."""

    def odds(logp: float) -> float:
        return math.exp(logp) / (1 - math.exp(logp))

    ratios = [odds(a) / odds(b) for a, b in ((-2, -2), (-2.5, -4.75), (-5, -3))]
    expected = [0.1 * math.log(1 + 1 / ratio) for ratio in ratios]
    assert PairObjective("orpo", reference=False)(golden(**SUMS), 0.1, 0.0).tolist() == pytest.approx(expected)
    assert expected[0] == pytest.approx(0.1 * math.log(2))


@pytest.mark.parametrize("logp", [0.0, -1e-9, -1e-3, -200.0])
def test_orpo_is_finite_at_certainty_and_at_impossibility(logp: float) -> None:
    chosen = torch.tensor([logp], requires_grad=True)
    one = torch.ones(1)
    pairs = PairLogRatios(chosen=chosen, rejected=-2 * one, chosen_tokens=one, rejected_tokens=one)
    loss = PairObjective("orpo", reference=False)(pairs, 0.1, 0.0)
    loss.sum().backward()
    assert chosen.grad is not None
    assert torch.isfinite(torch.cat([loss.detach(), chosen.grad])).all()


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_are_not_for_dpo(name: str) -> None:
    with pytest.raises(UserError, match=rf"'{name}' has no reference; use modules.SimPO"):
        PairObjective(name)


# ---------------------------------------------------------------------- the whole batch


def test_aot_matches_margins_in_their_order() -> None:
    """u = 2, -1, -6 of the policy, v = -4.6, 0.5, -2.3 of the reference: 2 goes with 0.5, -1 with -2.3, -6 with -4.6,
    so the differences are those of [G-DPO]. Pair by pair they are 6.6, -1.5, -3.7."""
    reference = tensor(-4.6, 0.5, -2.3)
    policy = tensor(2, -1, -6)
    pairs = golden(chosen=policy - reference, rejected=tensor(0, 0, 0), reference_delta=reference)
    objective = PairObjective("aot")
    found = objective(informed(pairs, objective), 0.1, 0.0)
    assert found.tolist() == pytest.approx([0.620957, 0.630258, 0.765595], abs=1e-6)


def test_aot_unpaired_by_hand() -> None:
    """c = 1 goes with j = 0.4, 0.5 with -0.5, -1 with -0.8."""
    objective = PairObjective("aot_unpaired")
    found = objective(informed(golden(), objective), 0.1, 0.0)
    assert found.tolist() == pytest.approx([softplus(-0.06), softplus(-0.1), softplus(0.02)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_gradients_of_aot_are_those_of_the_sorted_values(name: str, smoothing: float) -> None:
    """Against sorting both sides and differentiating through the sort."""
    draw = torch.Generator().manual_seed(0)
    sides = [torch.randn(9, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2)]
    reference = torch.randn(9, generator=draw, dtype=torch.float64)
    one = torch.ones(9, dtype=torch.float64)
    pairs = PairLogRatios(
        chosen=sides[0], rejected=sides[1], chosen_tokens=one, rejected_tokens=one, reference_delta=reference
    )
    objective = PairObjective(name, label_smoothing=smoothing)
    ours = objective(informed(pairs, objective), 0.5, smoothing).mean()
    if name == "aot":
        gap = (sides[0] - sides[1] + reference).sort().values - reference.sort().values
    else:
        gap = sides[0].sort().values - sides[1].sort().values
    log_p, log_q = torch.nn.functional.logsigmoid(0.5 * gap), torch.nn.functional.logsigmoid(-0.5 * gap)
    theirs = (-(1 - smoothing) * log_p - smoothing * log_q).mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-12)
    for a, b in zip(torch.autograd.grad(ours, sides), torch.autograd.grad(theirs, sides), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_pairs_of_weight_0_are_not_in_the_order() -> None:
    weights = tensor(1, 0, 1)
    pairs = golden(chosen=tensor(1, math.nan, -1), rejected=tensor(-0.5, 99, 0.4))
    objective = PairObjective("aot_unpaired")
    told = objective.whole(pairs, weights, 0.1, {}, True)
    assert told["aot_chosen"].tolist() == [0.4, 0, -0.5]
    assert told["aot_rejected"].tolist() == [-1, 0, 1]


def test_unequal_weights_have_no_match() -> None:
    with pytest.raises(UserError, match="match pairs one to one"):
        informed(golden(), PairObjective("aot_unpaired"), tensor(1, 2, 1))


def test_the_shift_of_bco_is_the_mean_of_all_batches() -> None:
    """First batch: mean of beta (c + j) / 2 = -0.1 * 0.4 / 6. Second: weights 1, 0, 3 of 0.5, -0.3, -0.6, so -0.1 * 1.3
    / 8. In evaluation nothing is learned."""
    objective, memory = PairObjective("bco"), {}
    one = torch.ones_like(golden().chosen)
    first = objective.whole(golden(), one, 0.1, memory, True)["bco_shift"]
    assert first.tolist() == pytest.approx([-0.04 / 6] * 3)
    found = objective(replace(golden(), whole={"bco_shift": first}), 0.1, 0.0)
    expected = [
        softplus(-0.1 * c - 0.04 / 6) + softplus(0.1 * j + 0.04 / 6) for c, j in zip(CHOSEN, REJECTED, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected)
    second = objective.whole(golden(), tensor(1, 0, 3), 0.1, memory, True)["bco_shift"]
    assert second.tolist() == pytest.approx([(-0.04 / 6 - 0.13 / 8) / 2] * 3)
    kept = dict(memory)
    assert objective.whole(golden(), one, 0.1, memory, False)["bco_shift"].tolist() == pytest.approx(second.tolist())
    nan = golden(chosen=tensor(math.nan, 0, 0))
    assert objective.whole(nan, one, 0.1, memory, True)["bco_shift"].tolist() == pytest.approx(second.tolist())
    assert memory == kept


def test_beta_of_each_pair() -> None:
    """Every loss with one beta for all and with as many equal ones; then the shift of bco with two: beta c of pair 1 at
    0.1, of pair 2 at 0.2, so (0.1 * 0.5 - 0.2 * 0.3) / 4."""
    more = {"chosen_nll": tensor(*NLL), "reference_delta": tensor(0.5, -2.3, -4.6), "margin": tensor(0.1, 0.2, 0.3)}
    for name, entry in DPO_LOSSES.items():
        objective = PairObjective(name, margins={"other": 0.3} if entry.margins else {}, reference=entry.reference)
        pairs = informed(golden(**more, share=0.7), objective)
        one, many = (objective(pairs, beta, 0.0) for beta in (0.1, tensor(0.1, 0.1, 0.1)))
        torch.testing.assert_close(one, many, atol=1e-12, rtol=0)
    told = PairObjective("bco").whole(golden(), tensor(1, 1, 0), tensor(0.1, 0.2, 9.0), {}, True)
    assert float(told["bco_shift"][0]) == pytest.approx(-0.01 / 4)


# ---------------------------------------------------------------------- the papers' defaults

# Beta and label smoothing; docs/preferences.md says where each is from.
PAPERS = {
    "sigmoid": (0.1, 0.0),
    "sigmoid_norm": (5.0, 0.0),
    "hinge": (0.05, 0.0),
    "ipo": (0.1, 0.0),
    "ipo_sum": (0.1, 0.0),
    "robust": (0.01, 0.1),
    "exo": (0.1, 0.001),
    "nca": (0.01, 0.0),
    "bco_pair": (0.01, 0.0),
    "bco": (0.01, 0.0),
    "sppo_hard": (0.001, 0.0),
    "apo_zero": (0.1, 0.0),
    "apo_down": (0.1, 0.0),
    "aot": (0.1, 0.0),
    "aot_unpaired": (0.1, 0.0),
    "discopop": (0.05, 0.0),
    "modpo": (0.1, 0.0),
}


def own(pairs: PairLogRatios, beta: float = 0.3, flipped: float = 0.2) -> Tensor:
    """A user's loss with defaults."""
    return pairs.delta


def bare(pairs: PairLogRatios, beta: float, smoothing: float) -> Tensor:
    """One without."""
    return pairs.delta


def test_every_loss_has_its_papers_defaults() -> None:
    """`sft` has no beta; that of simpo and orpo is in their modules."""
    assert set(PAPERS) == set(DPO_LOSSES) - {"sft", "simpo", "orpo"}
    for name, defaults in PAPERS.items():
        objective = PairObjective(name, margins={"other": 0.3} if name == "modpo" else {})
        assert (objective.beta, objective.label_smoothing) == defaults, name


@pytest.mark.parametrize(
    ("loss", "defaults"),
    [
        ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, (0.1, 0.0)),
        ({"bco_pair": 0.2, "sigmoid": 0.8}, (0.01, 0.0)),
        ({"sft": 1.0, "nca": 1.0}, (0.01, 0.0)),
        ({"hinge": 1.0, "robust": 1.0, "sigmoid": 1.0}, (0.05, 0.1)),  # hinge has no use for smoothing
        ("sft", (0.1, 0.0)),
        ("tests.unit.test_preference_losses.own", (0.3, 0.2)),
        ("tests.unit.test_preference_losses.bare", (0.1, 0.0)),
    ],
)
def test_defaults_of_mixes_and_of_ones_own(loss: Any, defaults: tuple[float, float]) -> None:
    objective = PairObjective(loss)
    assert (objective.beta, objective.label_smoothing) == defaults


def test_what_is_given_counts() -> None:
    assert PairObjective("nca", beta=0.2).own == {"label_smoothing": 0.0}
    objective = PairObjective("robust", beta=0.2, label_smoothing=0.0)
    assert (objective.beta, objective.label_smoothing, objective.own) == (0.2, 0.0, {})


@pytest.mark.parametrize("kind", [DPO, GeneralizedRPO])
def test_a_default_is_told_logged_moved_and_resumed(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of twice the configured beta is at 0.02. A checkpoint keeps its 0.01 when a later default is another."""
    told: list[str] = []
    monkeypatch.setattr("alignment.paired.rank_zero_info", told.append)
    module = kind(policy=TINY, loss="nca", reference="copy", optim=OPTIM)
    data = FixedData(groups(8, 2), batch_size=4)
    stages = Stages({"only": StageConfig(values={"beta": "x2"})})
    watch, run = fit(module, tmp_path, data, callbacks=[stages], plugins=[SafeCheckpointIO()])
    assert told == ["beta is 0.01: the default of loss nca"]
    assert [update["beta"] for update in watch.updates] == pytest.approx([0.02, 0.02])
    for kept in (module.hparams, module.hparams_initial):
        assert (kept["beta"], kept["label_smoothing"]) == (0.01, 0.0)
    run.save_checkpoint(tmp_path / "c")

    def later(pairs: PairLogRatios, beta: float | Tensor = 7.0, smoothing: float = 0.0) -> Tensor:
        return pairs.delta

    monkeypatch.setitem(DPO_LOSSES, "nca", replace(DPO_LOSSES["nca"], fn=later))
    again = kind.load_from_checkpoint(tmp_path / "c")
    assert (again.hparams["beta"], again.schedulables["beta"].configured, again.beta) == (0.01, 0.01, 0.02)


# ---------------------------------------------------------------------- mixes


def test_a_mix_by_hand() -> None:
    """Mixed preference optimisation: 0.8 * 0.672270 + 0.2 * 1.364336 + 45 / 16, the token mean of the chosen."""
    objective = PairObjective({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0})
    pairs = informed(golden(chosen_nll=tensor(*NLL)), objective)
    assert float(objective(pairs, 0.1, 0.0).mean()) == pytest.approx(
        0.8 * 0.672270 + 0.2 * 1.364336 + 45 / 16, abs=1e-6
    )


def test_the_token_mean_of_sft_weighs_tokens_by_their_pair() -> None:
    """Weights 1, 0, 3: (10 + 45) / (5 + 9)."""
    objective, weights = PairObjective({"sft": 1.0}), tensor(1, 0, 3)
    pairs = informed(golden(chosen_nll=tensor(*NLL)), objective, weights)
    assert float((objective(pairs, 0.1, 0.0) * weights).sum() / weights.sum()) == pytest.approx(55 / 14)


def test_settings_and_smoothing_reach_those_that_have_them() -> None:
    mixed = PairObjective({"discopop": 1.0, "robust": 1.0, "hinge": 1.0}, {"tau": 0.15}, label_smoothing=0.1)
    alone = [
        PairObjective("discopop", {"tau": 0.15})(golden(), 0.1, 0.0),
        PairObjective("robust")(golden(), 0.1, 0.1),
        PairObjective("hinge")(golden(), 0.1, 0.0),
    ]
    torch.testing.assert_close(mixed(golden(), 0.1, 0.1), sum(alone), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": {}}, "loss is {}; it is the name of a preference loss, or a mix is a mapping"),
        ({"loss": {"sigmoid": 0.0}}, "weight 0.0 for 'sigmoid'; it must be above 0"),
        ({"loss": {"sigmoid": "much"}}, "weight 'much' for 'sigmoid'"),
        ({"loss": {"sigmod": 1.0}}, "'sigmod' is not known; available"),
        ({"loss": "discopop", "settings": {"temperature": 1.0}}, "discopop has no setting temperature"),
        ({"loss": "discopop", "settings": {"tau": "small"}}, "tau 'small'; it is a number"),
        ({"loss": "discopop", "settings": {"tau": 0.0}}, "'discopop' has tau 0.0; it must be above 0"),
        ({"loss": "sigmoid", "beta": math.inf}, "beta is inf; it must be positive, and finite"),
        ({"loss": {"nca": 1.0, "hinge": 1.0}, "label_smoothing": 0.1}, "does not use label_smoothing"),
        ({"loss": "nca", "divergence": "js"}, "'nca' goes with reverse_kl, not with js; these do: .*sigmoid"),
        ({"loss": "aot", "divergence": "forward_kl"}, "'aot' goes with reverse_kl"),
        ({"loss": "sigmoid", "divergence": "kl"}, "divergence 'kl' is not known; use reverse_kl"),
        ({"loss": "sigmoid", "divergence": "alpha", "alpha": math.nan}, "divergence_alpha is nan"),
        ({"loss": {"sigmoid": 1.0, "aot": 1.0}, "weighted": True}, "wpo does not go with aot"),
        ({"loss": {"sft": 1.0}, "weighted": True}, "wpo does not go with sft alone"),
        ({"loss": {"sigmoid": 1.0, "modpo": 1.0}}, "'modpo' needs margins"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], message: str) -> None:
    loss, given = settings.pop("loss"), settings.pop("settings", None)
    with pytest.raises(UserError, match=message):
        PairObjective(loss, given, **settings)


# ---------------------------------------------------------------------- f-divergences


@pytest.mark.parametrize(
    ("divergence", "alpha", "at"),
    # At log-ratios 0, log 2, -log 2.
    [
        ("reverse_kl", 0.5, (0, math.log(2), -math.log(2))),
        ("forward_kl", 0.5, (0, 1 / 2, -1)),
        ("js", 0.5, (0, math.log(4 / 3), math.log(2 / 3))),
        ("alpha", 2.0, (0, 1, -1 / 2)),
        ("alpha", 0.5, (0, 2 * (1 - math.sqrt(1 / 2)), 2 * (1 - math.sqrt(2)))),
        ("alpha", 1.0, (0, math.log(2), -math.log(2))),
    ],
)
def test_scores_of_divergences(divergence: Any, alpha: float, at: tuple[float, ...]) -> None:
    """f'(t) of t = 1, 2, 1/2, where f is t log t, -log t + t, ..., moved to be 0 at 1; its slope in log t there is 1,
    and 1/2 for Jensen-Shannon."""
    log_ratios = tensor(0, math.log(2), -math.log(2)).requires_grad_()
    found = score(log_ratios, divergence, alpha)
    assert found.tolist() == pytest.approx(at, abs=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), log_ratios)
    assert float(slope[0]) == pytest.approx(0.5 if divergence == "js" else 1.0)


def test_a_loss_under_a_divergence() -> None:
    """beta (e^-j - e^-c) under forward KL; with ipo, which divides by lengths, the constant 1 counts."""
    found = PairObjective("sigmoid", divergence="forward_kl")(golden(), 0.1, 0.0)
    expected = [softplus(-0.1 * (math.exp(-j) - math.exp(-c))) for c, j in zip(CHOSEN, REJECTED, strict=True)]
    assert found.tolist() == pytest.approx(expected)
    found = PairObjective("ipo", divergence="forward_kl")(golden(), 0.1, 0.0)
    expected = [
        ((1 - math.exp(-c)) / n - (1 - math.exp(-j)) / m - 5) ** 2
        for c, j, n, m in zip(CHOSEN, REJECTED, *LENGTHS, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected)


def test_a_divergence_far_from_the_reference_is_finite() -> None:
    log_ratios = torch.tensor([-500.0, 500.0], requires_grad=True)
    for divergence, alpha in (("forward_kl", 0.5), ("js", 0.5), ("alpha", 0.5), ("alpha", 2.0)):
        found = score(log_ratios, divergence, alpha)  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(found.sum(), log_ratios)
        assert torch.isfinite(torch.stack([found, slope])).all(), divergence
        assert float(slope.max()) > 0.1, divergence


def test_every_loss_of_differences_is_one() -> None:
    """Adding the same to both log-ratios of a pair with equally long completions changes nothing, which is what an
    f-divergence needs; the others do change."""
    even = {"chosen_tokens": tensor(3, 3, 3), "rejected_tokens": tensor(3, 3, 3)}
    more = {"chosen_nll": tensor(*NLL), "reference_delta": tensor(0.5, -2.3, -4.6), "margin": tensor(0.1, 0.2, 0.3)}
    for name, entry in DPO_LOSSES.items():
        margins = {"other": 0.3} if entry.margins else {}
        objective = PairObjective(name, margins=margins, reference=entry.reference)
        values = []
        for moved in (0.0, 0.7):
            pairs = golden(
                **even, **more, chosen=tensor(*CHOSEN) + moved, rejected=tensor(*REJECTED) + moved, share=0.7
            )
            values.append(objective(informed(pairs, objective), 0.1, 0.0))
        if entry.differences:
            torch.testing.assert_close(values[0], values[1], atol=1e-12, rtol=0)
        elif name not in ("aot", "aot_unpaired", "bco", "simpo"):  # which have no need of a constant either, or none
            assert float((values[0] - values[1]).abs().max()) > 1e-6, name
