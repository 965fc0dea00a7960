"""Which algorithm to start with: a decision tree as data.

`QUESTIONS` are what is asked, `TREE` what the answers lead to. A leaf says what is run, with which settings and why.
Nothing here loads a model; `alignment.advice_cost` estimates memory and time, `alignment advise` asks and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from alignment.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`answers`: what can be said -> what it means."""

    text: str
    answers: Mapping[str, str]


QUESTIONS: Mapping[str, Question] = {
    "signal": Question(
        text="What says which reply is good?",
        answers={
            "demonstrations": "good replies to learn from, nothing else",
            "labels": "single replies marked good or bad",
            "pairs": "pairs of replies, one preferred",
            "reward": "something that scores any reply: a check, a program, a model, a judge",
        },
    ),
    "compute": Question(
        text="How much compute is there?",
        answers={"little": "one small GPU or a CPU", "plenty": "rollouts and a second trained model are affordable"},
    ),
    "priority": Question(
        text="What matters most?",
        answers={
            "safety": "a constraint that must hold: stay close to what the model does now",
            "performance": "the most that can be had",
            "balance": "neither of them alone",
        },
    ),
    "diversity": Question(
        text="Must replies stay diverse, and not only good?",
        answers={"yes": "the same prompt is to get different replies", "no": "one good reply is enough"},
    ),
    "field": Question(
        text="Are the rows of one kind?",
        answers={
            "general": "general dialogue",
            "professional": "several fields or kinds of prompts, told by a column `domain`",
        },
    ),
    "length": Question(
        text="How long are the replies?",
        answers={"short": "mostly below 256 tokens", "long": "mostly above"},
    ),
    "rewards": Question(
        text="How many rewards are there?", answers={"one": "one", "several": "two or more that may disagree"}
    ),
    "trade": Question(
        text="When is it known how the rewards are to be traded?",
        answers={
            "now": "before training",
            "later": "at decoding, from one model",
            "opposed": "now, and they pull in opposite directions",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run.

    Args:
        name: of its YAML file.
        module, data: classes of `modules` and `datamodules`.
        settings: of the module, what differs from its defaults; `rewards` are added where the module takes them.
        lr: learning rate of all weights; adapters take ten times as much.
        batch_size: rows of one optimizer step.
        monitor: the validation metric that chooses the best checkpoint, and "max" or "min".
    """

    name: str
    module: str
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1e-6
    batch_size: int = 64
    monitor: tuple[str, str] = ("val/loss", "min")

    @property
    def online(self) -> bool:
        """Whether it samples completions and scores them."""
        return self.data == "PromptData"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A leaf: what to run, in order, why, and the page about it."""

    title: str
    runs: tuple[Run, ...]
    because: tuple[str, ...]
    page: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A node: the question of that name, and where each answer leads."""

    question: str
    then: Mapping[str, Ask | Choice]


_PAIRED = ("val/rewards/accuracies", "max")
_SCORED = ("val/reward", "max")
_DPO = Run(name="dpo", module="DPO", data="PreferenceData", monitor=_PAIRED)
_GENERALIZED = replace(_DPO, name="generalized_rpo", module="GeneralizedRPO")
_REWARD_MODEL = Run(
    name="reward_model",
    module="RewardModel",
    data="PreferenceData",
    settings={"centre_coefficient": 0.01},
    lr=1e-5,
    monitor=_PAIRED,
)
_PPO = Run(
    name="ppo",
    module="PPO",
    data="PromptData",
    settings={"rewards": {"preferred": {"reward": "SequenceClassifier", "args": {"name": "models/reward"},
                                        "in_process": True}}},
    monitor=_SCORED,
)  # fmt: skip
_ENSEMBLE = (
    replace(_REWARD_MODEL, settings={**_REWARD_MODEL.settings, "members": 3, "aggregation": "uwo"}),
    replace(_PPO, settings={"rewards": {"preferred": {
        "reward": "SequenceClassifier", "args": {"name": "models/reward", "label": "members", "aggregation": "uwo"},
        "in_process": True}}}),
)  # fmt: skip
_SAFE_KL = {"coefficient": 0.2, "estimator": "k1", "place": "reward", "target": 6.0}
_GRPO = Run(
    name="grpo", module="GRPO", data="PromptData", settings={"completions": 8}, batch_size=16, monitor=_SCORED
)
_PCGRAD = {**_GRPO.settings, "combine": "pcgrad"}
_TWO_TERMS = "DPO with a floor under the entropy of replies and smooth token probabilities."
_OF_ITSELF = "Preferences train the policy itself: no reward model, no sampling."
_SCORES_ANY = "A reward model scores replies that no pair shows."


TREE = Ask(
    question="signal",
    then={
        "demonstrations": Choice(
            title="SFT",
            runs=(Run(name="sft", module="SFT", data="SupervisedData", lr=2e-5),),
            because=("Replies to imitate are all there is; every other method starts from what this one leaves.",),
            page="docs/data.md",
        ),
        "labels": Choice(
            title="KTO",
            runs=(Run(name="kto", module="KTO", data="UnpairedData", monitor=("val/accuracy", "max")),),
            because=("It learns from single replies marked good or bad; no pairs have to be made.",),
            page="docs/preferences.md",
        ),
        "pairs": Ask(
            question="diversity",
            then={
                "yes": Ask(
                    question="field",
                    then={
                        "general": Choice(
                            title="GeneralizedRPO",
                            runs=(_GENERALIZED,),
                            because=(
                                _TWO_TERMS,
                                "What both terms buy and cost is measured in reports/generalized_rpo.md.",
                            ),
                            page="docs/generalized_rpo.md",
                        ),
                        "professional": Choice(
                            title="GeneralizedRPO with domains",
                            runs=(replace(_GENERALIZED, settings={"domains": {"column": "domain"}}),),
                            because=(
                                _TWO_TERMS,
                                "Each domain has its own metrics, and may have its own beta and lambdas.",
                            ),
                            page="docs/generalized_rpo.md",
                        ),
                    },
                ),
                "no": Ask(
                    question="compute",
                    then={
                        "little": Ask(
                            question="length",
                            then={
                                "short": Choice(
                                    title="DPO",
                                    runs=(_DPO,),
                                    because=(
                                        _OF_ITSELF,
                                        "Sums of log-probs over a reply are fit for short replies.",
                                    ),
                                    page="docs/preferences.md",
                                ),
                                "long": Choice(
                                    title="DPO by the token",
                                    runs=(replace(_DPO, settings={"loss": "sigmoid_norm", "beta": 2.0}),),
                                    because=(
                                        _OF_ITSELF,
                                        "Log-ratios are means over tokens, so that long replies do not win by length.",
                                    ),
                                    page="docs/preferences.md",
                                ),
                            },
                        ),
                        "plenty": Ask(
                            question="priority",
                            then={
                                "safety": Choice(
                                    title="reward model, then PPO with a KL that follows a target",
                                    runs=(_REWARD_MODEL, replace(_PPO, settings={**_PPO.settings, "kl": _SAFE_KL})),
                                    because=(
                                        _SCORES_ANY,
                                        "The KL penalty keeps the policy as near to its start as you say.",
                                    ),
                                    page="docs/online.md",
                                ),
                                "performance": Choice(
                                    title="ensemble of reward models, then PPO",
                                    runs=_ENSEMBLE,
                                    because=(
                                        _SCORES_ANY,
                                        "Where its members disagree, the reward is held back: less to exploit.",
                                    ),
                                    page="docs/online.md",
                                ),
                                "balance": Choice(
                                    title="reward model, then PPO",
                                    runs=(_REWARD_MODEL, _PPO),
                                    because=(_SCORES_ANY,),
                                    page="docs/online.md",
                                ),
                            },
                        ),
                    },
                ),
            },
        ),
        "reward": Ask(
            question="rewards",
            then={
                "one": Choice(
                    title="GRPO",
                    runs=(_GRPO,),
                    because=("Groups of replies to a prompt are compared with each other: no critic to train.",),
                    page="docs/online.md",
                ),
                "several": Ask(
                    question="trade",
                    then={
                        "now": Choice(
                            title="GDPO",
                            runs=(replace(_GRPO, name="gdpo", module="GDPO"),),
                            because=(
                                "Each reward is normalised by itself, so that none drowns the others.",
                                "It had the best geometric overall score of the methods in reports/multi_reward.md.",
                            ),
                            page="docs/multi_reward.md",
                        ),
                        "later": Choice(
                            title="DecoupledPO",
                            runs=(replace(_GRPO, name="decoupled_po", module="DecoupledPO"),),
                            because=(
                                "One head per reward on a shared trunk: a dial trades them at decoding.",
                                "One run covers more of the front than separate runs did in reports/multi_reward.md.",
                            ),
                            page="docs/multi_reward.md",
                        ),
                        "opposed": Choice(
                            title="MORL with PCGrad",
                            runs=(replace(_GRPO, name="morl", module="MORL", settings=_PCGRAD),),
                            because=(
                                "Gradients of rewards are taken apart, and what contradicts another is projected out.",
                                "Compare it with GDPO, which costs less: one gradient in place of one per reward.",
                            ),
                            page="docs/morl.md",
                        ),
                    },
                ),
            },
        ),
    },
)


def decide(answer: Callable[[str], str], node: Ask | Choice = TREE) -> Choice:
    """Walk from `node` to a leaf; `answer` is asked for each question on the way. Raises UserError for a wrong one."""
    while isinstance(node, Ask):
        said = answer(node.question)
        if said not in node.then:
            raise UserError(f"--{node.question} is one of {', '.join(node.then)}; got '{said}'")
        node = node.then[said]
    return node


def leaves(node: Ask | Choice = TREE) -> Iterator[tuple[dict[str, str], Choice]]:
    """Every leaf below `node` with the answers that lead to it."""
    if isinstance(node, Choice):
        yield {}, node
        return
    for said, below in node.then.items():
        for answers, choice in leaves(below):
            yield {node.question: said, **answers}, choice
