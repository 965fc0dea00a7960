"""A suite of rewards: parameters, scales, conditions, weights, state, workers."""

from __future__ import annotations

import pickle
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
import yaml

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.rewards import RewardMatrix, RewardsFailing, RewardSpec, RewardSuite, Samples, SuiteConfig, Texts
from tests.reward_toys import everything, one

NAN = float("nan")
HOME = "tests.reward_faults"


def given(name: str) -> Any:
    """An in-process reward that reads its values from the data column `name`."""

    def reward(completion: str, columns: Mapping[str, Any]) -> float | None:
        return columns[name]

    return reward


def here(name: str, **settings: Any) -> dict[str, Any]:
    return {"reward": given(name), "in_process": True, **settings}


def table(**columns: list[float | None]) -> Samples:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Samples(prompts=["p"] * len(rows), completions=["c"] * len(rows), columns=rows)


def scores(suite: RewardSuite, samples: Samples, *, learn: bool = True) -> list[list[float]]:
    return suite.submit_samples(samples, learn=learn).collect().values.T.tolist()


def same(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), equal_nan=True, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------- from a rollout


class Rollout:
    batch = GroupBatch.from_groups(
        [
            Group(prompt=[1, 2], completions=[[3], [4, 5]], columns={"answer": "a"}),
            Group(prompt=[6], completions=[[], [7, 8, 9]], columns={"answer": "b"}),
        ]
    )
    truncated = torch.tensor([False, True, False, False])


def test_every_parameter_arrives_in_order() -> None:
    """As lists, one by one, in a worker and here; prompts and columns repeated for their group."""
    rewards = {
        "all": {"reward": "tests.reward_toys.everything"},
        "one": {"reward": "tests.reward_toys.one"},
        "all_here": {"reward": everything, "in_process": True},
        "one_here": {"reward": one, "in_process": True},
        "parts": {"reward": "tests.reward_toys.everything", "batch_size": 3},
        "parts_here": {"reward": everything, "in_process": True, "batch_size": 3},
    }
    with RewardSuite(rewards, SuiteConfig(workers=1)) as suite:
        matrix = suite.score(Rollout(), Texts(["P", "Q"], ["x", "y", "", "z"]))
    assert matrix.names == tuple(rewards)
    assert matrix.values.T.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 6
    assert set(matrix.seconds) == {"all", "one", "parts"}


def test_decoding(tiny_tokenizer) -> None:
    """Prompts keep their template; completions lose the end of text."""
    prompt = tiny_tokenizer("<bos><|im_start|>user\nhi<|im_end|>\n")["input_ids"]
    reply = tiny_tokenizer("hello")["input_ids"]
    batch = GroupBatch.from_groups([Group(prompt=prompt, completions=[[*reply, 3], [3], []])])
    texts = Texts.decode(batch, tiny_tokenizer)
    assert texts == (["<bos><|im_start|>user\nhi<|im_end|>\n"], ["hello", "", ""])


def test_texts_must_fit_the_rollout() -> None:
    with pytest.raises(ValueError, match="1 prompts and 4 completions for a rollout with 2 and 4"):
        Samples.of(Rollout(), Texts(["P"], ["x", "y", "", "z"]))
    with pytest.raises(ValueError, match="1 prompt_ids for 2 completions"):
        Samples(prompts=["", ""], completions=["", ""], prompt_ids=[[1]])


def test_no_completions() -> None:
    with RewardSuite({"a": f"{HOME}.length", "b": here("b")}) as suite:
        matrix = suite.submit_samples(Samples(prompts=[], completions=[])).collect()
    assert matrix.values.shape == (0, 2)
    assert suite.state_dict()["history"]["window"] == {"a": [], "b": []}


def test_columns_by_name() -> None:
    def reward(completions: list[str], answer: list[Any], hint: list[Any] | None = None) -> list[float]:
        assert hint is None
        return [0.0 if a is None else a for a in answer]

    suite = RewardSuite({"r": {"reward": reward, "in_process": True}})
    rows: list[dict[str, Any]] = [{"answer": 1.0}, {"question": "q"}]
    samples = Samples(prompts=["", ""], completions=["", ""], columns=rows)
    assert scores(suite, samples) == [[1.0, 0.0]]  # None where a row lacks the column
    with pytest.raises(UserError, match="reward 'r' needs the data column 'answer'; the data's columns: question"):
        suite.submit_samples(Samples(prompts=[""], completions=[""], columns=[{"question": "q"}]))


def test_columns_that_a_reward_looks_up_itself() -> None:
    suite = RewardSuite({"r": {"reward": "ExactMatch", "args": {"column": "x"}, "in_process": True}})
    with pytest.raises(UserError, match="reward 'r' needs the data column 'x'; the data's columns: none"):
        suite.submit_samples(Samples(prompts=[""], completions=[""]))


def test_ids_that_are_not_known() -> None:
    suite = RewardSuite({"r": {"reward": "Efficiency", "in_process": True}})
    with pytest.raises(UserError, match="reward 'r' needs completion_ids, which these samples do not have"):
        suite.submit_samples(Samples(prompts=[""], completions=[""]))


# --------------------------------------------------------------------------------- weights, scales and conditions


def test_weighted_total() -> None:
    """ALGORITHMS section 8: (2, .8, 1.5) . (.9, .4, .324734) = 2.607101. Abstentions add nothing; all of them: NaN."""
    suite = RewardSuite({"a": here("a", weight=2.0), "b": here("b", weight=0.8), "c": here("c", weight=1.5)})
    matrix = suite.submit_samples(
        table(a=[0.9, 0.9, None], b=[0.4, None, None], c=[0.324734, 0.324734, None])
    ).collect()
    expected = torch.tensor([2.607101, 2.287101, NAN])
    torch.testing.assert_close(matrix.total(), expected, equal_nan=True, atol=1e-6, rtol=0)
    assert matrix.weights.tolist() == pytest.approx([2.0, 0.8, 1.5])


def test_fixed_scale() -> None:
    suite = RewardSuite({"a": here("a", scale=[-3, 3])})
    same(scores(suite, table(a=[-3.0, 0.0, 1.5, 3.0, 9.0, None])), [[0.0, 0.5, 0.75, 1.0, 1.0, NAN]])


def test_running_scale() -> None:
    """Smallest and largest so far, the batch itself included; evaluation neither learns nor leaves [0, 1]."""
    suite = RewardSuite({"a": here("a", scale="running")})
    same(scores(suite, table(a=[None, None])), [[NAN, NAN]])
    same(scores(suite, table(a=[7.0, 8.0]), learn=False), [[0.0, 1.0]])  # nothing known yet: its own range
    same(scores(suite, table(a=[4.0, 4.0])), [[0.5, 0.5]])
    same(scores(suite, table(a=[2.0, 4.0, None])), [[0.0, 1.0, NAN]])
    same(scores(suite, table(a=[3.0, 6.0])), [[0.25, 1.0]])
    same(scores(suite, table(a=[0.0, 5.0, 10.0]), learn=False), [[0.0, 0.75, 1.0]])
    resumed = RewardSuite({"a": here("a", scale="running"), "new": here("a", scale="running")})
    resumed.load_state_dict(suite.state_dict())
    same(scores(resumed, table(a=[3.0, 5.0])), [[0.25, 0.75], [0.0, 1.0]])


def test_condition() -> None:
    """Equation 8 of GDPO: r 1[l >= t]. The other's raw value counts; abstaining there means abstaining here."""
    condition = {"reward": "right", "at_least": 1.0}
    suite = RewardSuite(
        {
            "short": here("short", scale=[0, 10], condition=condition),
            "right": here("right", scale=[0, 4]),
            "chained": here("right", condition={"reward": "short", "at_least": 5.0}),
        }
    )
    samples = table(short=[5.0, 5.0, 5.0, None, None, 0.0], right=[1.0, 0.5, None, 1.0, 0.0, 4.0])
    same(
        scores(suite, samples),
        [
            [0.5, 0.0, NAN, NAN, NAN, 0.0],
            [0.25, 0.125, NAN, 0.25, 0.0, 1.0],
            [1.0, 0.5, NAN, NAN, NAN, 0.0],
        ],
    )


def test_raw_values_are_kept() -> None:
    suite = RewardSuite({"a": here("a", scale=[0, 10]), "b": here("a")})
    matrix = suite.submit_samples(table(a=[5.0, None])).collect()
    same(matrix.raw.T.tolist(), [[5.0, NAN], [5.0, NAN]])
    assert matrix.changed == {"a"}


def test_metrics() -> None:
    """Means over those that did not abstain; std unbiased; shares over all completions."""
    suite = RewardSuite({"a": here("a", scale=[0, 2]), "b": here("b")})
    found = suite.submit_samples(table(a=[0.0, 1.0, 2.0, None], b=[None, None, None, float("inf")])).collect().metrics()
    means = {name: float(s / c) if c else NAN for name, (s, c) in found.items()}
    assert means == pytest.approx(
        {
            "rewards/a/mean": 0.5,
            "rewards/a/std": 0.5,
            "rewards/a/abstained": 0.25,
            "rewards/a/faults": 0.0,
            "rewards/a/raw_mean": 1.0,
            "rewards/b/mean": NAN,
            "rewards/b/abstained": 1.0,
            "rewards/b/faults": 0.25,
        },
        nan_ok=True,
    )


# ----------------------------------------------------------------------------------------------------- several ranks


def test_ranks_scale_alike_and_stop_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank saw values from 0 to 8 and lost all of its 3 completions to faults."""
    monkeypatch.setattr(distributed, "all_gather_objects", lambda mine: [mine, ({"a": (0.0, 8.0)}, {"a": (3, 3)})])
    suite = RewardSuite({"a": here("a", scale="running")}, SuiteConfig(fault_window=2, fault_limit=0.59))
    same(scores(suite, table(a=[2.0, 4.0])), [[0.25, 0.5]])
    with pytest.raises(RewardsFailing, match=r"60% of 10 completions over the last 2 batches .*other ranks"):
        scores(suite, table(a=[2.0, 4.0]))


# ----------------------------------------------------------------------------------------------------------- workers


def scored_by(workers: int, batch_size: int | None) -> RewardMatrix:
    rewards = {
        "noisy": RewardSpec(reward="tests.reward_toys.noisy", batch_size=batch_size),
        "numpy": RewardSpec(reward="tests.reward_toys.noisy_numpy", batch_size=batch_size),
        "lengths": RewardSpec(reward=f"{HOME}.lengths", batch_size=batch_size),
    }
    completions = [f"completion {i}" * (i % 3) for i in range(30)]
    with RewardSuite(rewards, SuiteConfig(workers=workers), seed=7) as suite:
        return suite.submit_samples(Samples(prompts=["p"] * 30, completions=completions)).collect()


def test_results_do_not_depend_on_the_workers() -> None:
    """Even draws from global generators: they follow from what is scored."""
    first, second = scored_by(1, None), scored_by(3, 4)
    torch.testing.assert_close(first.values, second.values, rtol=0, atol=0)
    assert len(set(first.values[:, 0].tolist())) == 21  # 10 of the 30 completions are empty, and equal


def test_draws_in_this_process_are_those_of_a_worker() -> None:
    """And the generators of the run stand where they stood."""
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    rewards = {
        f"{name} {here}": RewardSpec(reward=f"tests.reward_toys.{name}", in_process=here)
        for name in ("noisy", "noisy_numpy")
        for here in (False, True)
    }
    samples = Samples(prompts=["p"] * 5, completions=list("abcde"))
    with RewardSuite({n: s for n, s in rewards.items() if not s.in_process}, SuiteConfig(workers=1), seed=7) as suite:
        there = suite.submit_samples(samples).collect().values
    renamed = {n.replace("True", "False"): s for n, s in rewards.items() if s.in_process}  # draws are keyed by the name
    ours = RewardSuite(renamed, seed=7).submit_samples(samples).collect().values
    assert len(set(ours.flatten().tolist())) == 10
    assert torch.equal(ours, there)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("in_process", [True, False])
def test_a_reward_may_change_what_it_is_given(in_process: bool) -> None:
    """Two completions of one prompt, with one row: 3 + 1 + 1 and 3 + 2 + 1, however often they are scored."""
    ids, row = [1, 2, 3], {"answer": {"text": "x"}}
    samples = Samples(
        prompts=["p", "p"],
        completions=["a", "b"],
        prompt_ids=[ids, ids],
        completion_ids=[[4], [5, 6]],
        truncated=[False, False],
        columns=[row, row],
    )
    names = ("greedy", "greedy_batch") if in_process else ("greedy",)
    rewards = {n: RewardSpec(reward=f"tests.reward_toys.{n}", in_process=in_process) for n in names}
    with RewardSuite(rewards, SuiteConfig(workers=1)) as suite:
        for _ in range(2):
            same(scores(suite, samples), [[5.0, 6.0]] * len(names))
    assert (ids, samples.completion_ids, row) == ([1, 2, 3], [[4], [5, 6]], {"answer": {"text": "x"}})


MEETING = """
import pathlib, time

def meet(completion, columns):
    folder = pathlib.Path(columns["folder"])
    (folder / completion).touch()
    until = time.monotonic() + 20
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > until:
            raise RuntimeError("alone")
        time.sleep(0.01)
    return 1.0

class Named:
    def __init__(self, value, doubled=False):
        self.value = 2 * value if doubled else value

    def __call__(self, completions, **kwargs):
        return [self.value + len(kwargs["prompts"])] * len(completions)
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file of rewards, importable as `my_meeting_rewards`."""
    (tmp_path / "my_meeting_rewards.py").write_text(MEETING)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "meeting"
    folder.mkdir()
    return folder


def test_completions_are_scored_in_parallel_beside_the_caller(outside: Path) -> None:
    """Both calls wait for each other; the caller is free meanwhile, and in-process rewards run when it collects."""
    called: list[str] = []
    rewards = {
        "meet": {"reward": "my_meeting_rewards.meet", "batch_size": 1, "timeout_s": 60},
        "mine": {"reward": lambda completion: called.append(completion), "in_process": True},
    }
    samples = Samples(prompts=["", ""], completions=["a", "b"], columns=[{"folder": str(outside)}] * 2)
    with RewardSuite(rewards, SuiteConfig(workers=2)) as suite:
        pending = suite.submit_samples(samples)
        until = time.monotonic() + 30
        while not pending.done() and time.monotonic() < until:
            time.sleep(0.01)
        assert pending.done()
        assert called == []
        same(pending.collect().values.T.tolist(), [[1.0, 1.0], [NAN, NAN]])
    assert called == ["a", "b"]


def test_a_users_class_with_arguments(outside: Path) -> None:
    spec = {"reward": "my_meeting_rewards.Named", "args": {"value": 1.5, "doubled": True}}
    with RewardSuite({"named": spec}, SuiteConfig(workers=1)) as suite:
        assert scores(suite, Samples(prompts=["p", "p"], completions=["a", "b"])) == [[5.0, 5.0]]


def test_a_copy_for_another_process_starts_its_own_workers() -> None:
    with RewardSuite({"r": f"{HOME}.length"}, SuiteConfig(workers=1)) as suite:
        scores(suite, Samples(prompts=["p"], completions=["abc"]))
        with pickle.loads(pickle.dumps(suite)) as copy:
            assert scores(copy, Samples(prompts=["p"], completions=["abc"])) == [[3.0]]


def test_a_closed_suite_starts_again() -> None:
    suite = RewardSuite({"r": f"{HOME}.length"}, SuiteConfig(workers=1))
    for _ in range(2):
        assert scores(suite, Samples(prompts=["p"], completions=["abc"])) == [[3.0]]
        suite.close()


def test_errors_of_rewards_in_this_process_are_faults_too() -> None:
    def broken(completion: str) -> float:
        raise ValueError(completion)

    suite = RewardSuite({"broken": {"reward": broken, "in_process": True}, "sound": here("a")})
    matrix = suite.submit_samples(table(a=[1.0])).collect()
    assert matrix.faults == {"broken": Counter({"raise": 1}), "sound": Counter()}
    same(matrix.values.T.tolist(), [[NAN], [1.0]])


# ----------------------------------------------------------------------------------------------------- configuration


YAML = """
rewards:
  correct:
    reward: NumericMatch
    weight: 2
  short:
    reward: LengthWithin
    args: {maximum: 4}
    scale: [0, 2]
    condition: {reward: correct, at_least: 1}
  tone:
    reward: my_rewards.tone
    scale: running
    timeout_s: 5
    in_process: true
settings: {workers: 3, on_fault: stop}
"""


def test_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line makes of a module's parameters of these types is what the suite takes."""

    def build(rewards: dict[str, RewardSpec], settings: SuiteConfig = SuiteConfig()) -> RewardSuite:  # noqa: B008
        return RewardSuite(rewards, settings)

    (tmp_path / "my_rewards.py").write_text("def tone(completion): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "rewards.yaml"
    path.write_text(YAML)
    words = [f"--config={path}", "--rewards.correct.weight=3"]
    suite = jsonargparse.auto_cli(build, args=words, as_positional=False)
    assert suite.names == ("correct", "short", "tone")
    assert suite.weights.tolist() == [3.0, 1.0, 1.0]
    assert (suite.specs["short"].reward, suite.specs["short"].args) == ("LengthWithin", {"maximum": 4})
    assert suite.specs["short"].scale == (0.0, 2.0)
    condition = suite.specs["short"].condition
    assert condition is not None
    assert (condition.reward, condition.at_least) == ("correct", 1.0)
    assert (suite.specs["tone"].reward, suite.specs["tone"].scale) == ("my_rewards.tone", "running")
    assert (suite.config.workers, suite.config.on_fault) == (3, "stop")


def test_the_defaults_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"`(\w+)` \((\d[\d.]*)(?: seconds)?\)", text))
    config, spec = SuiteConfig(), RewardSpec(reward="x.y")
    real = {"fault_limit": config.fault_limit, "fault_window": config.fault_window, "timeout_s": spec.timeout_s}
    assert {name: float(value) for name, value in named.items()} == real


def test_a_row_without_a_column_that_others_have_gives_none() -> None:
    samples = Samples(prompts=["p"] * 2, completions=["c"] * 2, columns=[{"answer": "c"}, {"other": 1}])
    seen = {"reward": lambda completion, answer: float(answer is None), "in_process": True}
    with RewardSuite({"seen": seen}) as suite:
        assert scores(suite, samples) == [[0.0, 1.0]]


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: overlaps 3 (2 at most), 0 and None of 2; politeness where the overlap is at least 1."""
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    code, settings = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None
    assert settings is not None
    (tmp_path / "my_rewards.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    samples = Samples(
        prompts=["p"] * 3,
        completions=["Please: a b c", "please", "Please"],
        completion_ids=[[5] * 64, [5] * 65, []],
        columns=[{"keywords": ["a", "b", "c"]}, {"keywords": ["x"]}, {"keywords": None}],
    )
    with RewardSuite(yaml.safe_load(settings[1])["rewards"], SuiteConfig(workers=1)) as suite:
        matrix = suite.submit_samples(samples).collect()
    same(matrix.values.T.tolist(), [[1.0, 0.0, NAN], [1.0, 0.0, NAN], [1.0, 0.0, 1.0]])
    same(matrix.total()[None].tolist(), [[4.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("rewards", "config", "told"),
    [
        ({}, {}, "no rewards are given"),
        ({"a/b": "x.y"}, {}, "it has no '/'"),
        ({"x": "Fromat"}, {}, r"reward 'x': there is no 'Fromat'; did you mean 'Format'\?"),
        (
            {"x": "mine"},
            {},
            "reward 'x': there is no 'mine'; there are ExactMatch, .*, and your own as my_file.my_reward",
        ),
        ({"a": {"reward": "x.y", "scale": [1, 1]}}, {}, "low below high"),
        ({"a": {"reward": "x.y", "scale": [float("-inf"), 1]}}, {}, r"scale is \[-inf, 1\]; it is"),
        (
            {"a": "x.y", "b": {"reward": "x.y", "condition": {"reward": "a", "at_least": NAN}}},
            {},
            "reward 'b': its condition has at_least nan",
        ),
        ({"a": "x.y"}, {"memory_mb": 0}, "memory_mb is 0"),
        ({"a": {"reward": "x.y", "scale": "auto"}}, {}, r"use \[low, high\], running"),
        ({"a": {"reward": "x.y", "timeout_s": 0}}, {}, "timeout_s is 0"),
        ({"a": {"reward": "x.y", "batch_size": 0}}, {}, "batch_size is 0"),
        ({"a": {"reward": "x.y", "wieght": 1}}, {}, "no field wieght"),
        ({"a": {"reward": "x.y", "condition": {"reward": "a", "at_least": 1}}}, {}, "conditioned on itself"),
        (
            {"right": "x.y", "b": {"reward": "x.y", "condition": {"reward": "rigth", "at_least": 1}}},
            {},
            "reward 'b' is conditioned on 'rigth', which is not a reward; did you mean 'right'",
        ),
        ({"a": lambda completion: 1.0}, {}, "a worker cannot import.*in_process: true"),
        ({"a": "x.y"}, {"workers": 0}, "workers is 0"),
        ({"a": "x.y"}, {"fault_limit": 2.0}, "fault_limit"),
        ({"a": "x.y"}, {"load_timeout_s": 0.0}, "load_timeout_s"),
        ({"a": {"reward": "x.y", "weight": NAN}}, {}, "weight is nan"),
    ],
)
def test_specifications_that_cannot_work(rewards: Any, config: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        RewardSuite(rewards, config)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such_module.reward", "reward 'x' cannot be loaded: there is no module 'no_such_module'; your own file"),
        (f"{HOME}.nothing", "reward 'x' cannot be loaded: 'tests.reward_faults' has no 'nothing'"),
        ("alignment.errors.UserError", "'alignment.errors.UserError' cannot be called"),
        ("Format", "args: missing a required argument: 'pattern'; Format takes pattern, where"),
    ],
)
def test_rewards_that_cannot_be_loaded(path: str, told: str, in_process: bool) -> None:
    with pytest.raises(UserError, match=told):
        with RewardSuite({"x": {"reward": path, "in_process": in_process}}, SuiteConfig(workers=1)) as suite:
            suite.start()


def test_columns_are_looked_for_in_every_row() -> None:
    """The third row has the column; without it the message lists what the others have, and no worker is left."""
    rows = [{"a": 1}, {"a": 2, "b": 3}, {"answer": "x"}]
    with RewardSuite({"x": "ExactMatch"}, SuiteConfig(workers=1)) as suite:
        suite.check_columns(iter(rows))
        suite.check_columns([])
        with pytest.raises(UserError, match=r"reward 'x' needs the data column 'answer'; .*: a, b$"):
            suite.check_columns(iter(rows[:2]))
        assert suite._pool is None


def test_data_that_cannot_be_sent() -> None:
    samples = Samples(prompts=["p"], completions=["c"], columns=[{"answer": lambda: 1}])
    with RewardSuite({"x": "ExactMatch"}, SuiteConfig(workers=1)) as suite:
        with pytest.raises(UserError, match="reward 'x': its data cannot be sent to a worker"):
            suite.submit_samples(samples)
