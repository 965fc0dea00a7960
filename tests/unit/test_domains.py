"""Domains of pairs: values of their own, the ascent of group DRO by hand, mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from alignment.batches import Group, GroupBatch
from alignment.domains import DomainConfig, Domains
from alignment.errors import UserError


def pairs(*names: Any, column: str = "domain") -> GroupBatch:
    rows = [Group(prompt=[1], completions=[[5], [6]], columns={column: n}, index=i) for i, n in enumerate(names)]
    return GroupBatch.from_groups(rows)


def adaptive(**settings: Any) -> Domains:
    return Domains(DomainConfig(adaptive=True, **settings))


def test_values_of_their_own_move_with_the_general_one() -> None:
    """beta .1 for all and .4 for legal; a callback that halves beta halves both."""
    domains = Domains(DomainConfig(beta={"legal": 0.4}))
    batch = pairs("legal", "chat", "legal")
    assert domains.values(batch, "beta", 0.1, 0.1).tolist() == pytest.approx([0.4, 0.1, 0.4])
    assert domains.values(batch, "beta", 0.05, 0.1).tolist() == pytest.approx([0.2, 0.05, 0.2])
    assert domains.values(batch, "lambda_smooth", 0.3, 0.1) == 0.3
    # Of 0 there is no factor: what a domain has of its own stays.
    zero = Domains(DomainConfig(lambda_entropy={"legal": 0.2}))
    assert zero.values(batch, "lambda_entropy", 0.0, 0.0).tolist() == pytest.approx([0.2, 0.0, 0.2])


def test_one_step_of_the_ascent() -> None:
    """q = 1/3 each, eta .5, losses ln 2, ln 4, ln 8: q is proportional to 2^.5, 4^.5, 8^.5 = 1 : sqrt 2 : 2."""
    domains = adaptive(step_size=0.5)
    domains.know(["a", "b", "c"])
    assert domains.weights == pytest.approx(dict.fromkeys("abc", 1 / 3))
    domains.observe({"a": math.log(2), "b": math.log(4), "c": math.log(8)})
    total = 3 + math.sqrt(2)
    assert domains.weights == pytest.approx({"a": 1 / total, "b": math.sqrt(2) / total, "c": 2 / total})


def test_a_domain_that_a_batch_lacks_keeps_its_weight() -> None:
    domains = adaptive(step_size=1.0)
    domains.know(["a", "b", "c"])
    domains.observe({"a": 0.0, "b": math.log(3)})
    assert domains.weights == pytest.approx({"a": 2 / 3 / 4, "b": 2 / 3 * 3 / 4, "c": 1 / 3})
    domains.observe({})
    assert sum(domains.weights.values()) == pytest.approx(1)


def test_large_losses_do_not_overflow() -> None:
    domains = adaptive(step_size=1.0)
    domains.know(["a", "b"])
    domains.observe({"a": 1e6, "b": 1e6 + math.log(3)})
    assert domains.weights == pytest.approx({"a": 0.25, "b": 0.75}, rel=1e-6)


def test_a_domain_that_comes_later_has_the_average_weight() -> None:
    domains = adaptive()
    domains.know(["a"])
    domains.weights = {"a": 1.0}
    domains.know(["a", "b"])
    assert domains.weights == {"a": 0.5, "b": 0.5}
    domains.weights = {"a": 0.8, "b": 0.2}
    domains.know(["c"])
    assert domains.weights == pytest.approx({"a": 0.8 * 2 / 3, "b": 0.2 * 2 / 3, "c": 1 / 3})


def test_factors_turn_a_mean_over_pairs_into_means_over_domains() -> None:
    """Three pairs of a, one of b, one of b that weighs nothing; q = (.25, .75). The mean of 4 with factors q 4 / n."""
    domains = adaptive()
    domains.know(["a", "b"])
    domains.weights = {"a": 0.25, "b": 0.75}
    batch = pairs("a", "b", "a", "a", "b")
    counts = domains.counts(batch, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert counts == {"a": 3.0, "b": 1.0}
    assert domains.factors(batch, counts).tolist() == pytest.approx([1 / 3, 3.0, 1 / 3, 1 / 3, 3.0])
    assert Domains(DomainConfig()).counts(batch, torch.ones(5)) == {}


def test_metrics_of_each_domain() -> None:
    batch = pairs("a", "b", "a")
    found = Domains(DomainConfig()).metrics(batch, torch.tensor([1.0, 1.0, 3.0]), loss=torch.tensor([1.0, 2.0, 5.0]))
    assert {name: float(s / n) for name, (s, n) in found.items()} == {"domain/a/loss": 4.0, "domain/b/loss": 2.0}


@pytest.mark.parametrize("value", [None, "", 1.5, True])
def test_a_row_without_a_domain_is_named(value: Any) -> None:
    domains = Domains(DomainConfig(column="field"))
    with pytest.raises(UserError, match=rf"row 1 has {value!r} in column 'field', which domains.column names"):
        domains.names(pairs("a", value, column="field"))
    with pytest.raises(UserError, match="row 0 has None in column 'field'"):
        domains.names(pairs("a"))


def test_a_number_is_a_name_too() -> None:
    assert Domains(DomainConfig()).names(pairs(3, "3", "x")) == ["3", "3", "x"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": {"a": 0.0}}, "domains.beta of 'a' is 0.0; it must be positive"),
        ({"lambda_smooth": {"a": -0.1}}, "domains.lambda_smooth of 'a' is -0.1; it must not be negative"),
        ({"lambda_entropy": {"a": math.nan}}, "domains.lambda_entropy of 'a' is nan"),
        ({"step_size": 0.0}, "domains.step_size is 0.0; it must be positive"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DomainConfig(**settings)


def test_settings_of_a_domain_that_no_row_is_of() -> None:
    rows = [Group(prompt=[1], completions=[[5], [6]], columns={"domain": n}) for n in ("legal", "chat")]
    with pytest.raises(UserError, match=r"domains.beta names 'legl', and column 'domain' .* has chat, legal"):
        Domains(DomainConfig(beta={"legl": 0.2})).read(rows)
    with pytest.raises(UserError, match="validation row 7 has None in column 'domain'"):
        adaptive().read(rows, [Group(prompt=[1], completions=[[5], [6]], index=7)])
    domains = adaptive(beta={"legal": 0.2})
    domains.read(rows)
    assert domains.weights == {"chat": 0.5, "legal": 0.5}
