"""Rewards: named, weighted, supervised. Names are imported when asked for, so that a worker starts without torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

SHIPPED = {
    "ExactMatch": "match",
    "NumericMatch": "match",
    "ReasoningGym": "gym",
    "Format": "text",
    "RepetitionPenalty": "text",
    "Efficiency": "length",
    "LengthWithin": "length",
    "SoftOverlong": "length",
    "SequenceClassifier": "model",
    "Compiles": "code",
    "UnitTests": "code",
    "RunTime": "code",
    "Flake8": "code_lint",
    "Bandit": "code_lint",
    "FaqMatch": "faq",
    "Sentiment": "tone",
    "Toxicity": "tone",
    "Refusal": "refusal",
    "Readability": "readability",
    "MathVerify": "symbolic",
    "WordErrorRate": "multimodal",
    "CLIPScore": "multimodal",
    "LLMJudge": "judge",
    "PairJudge": "judge",
}
"""Rewards that are named without a dot: name -> file."""

_HOME = {
    "Condition": "protocol",
    "Reward": "protocol",
    "RewardSpec": "protocol",
    "RewardsFailing": "protocol",
    "Samples": "protocol",
    "SuiteConfig": "protocol",
    "Texts": "protocol",
    "RewardMatrix": "matrix",
    "Pending": "suite",
    "RewardSuite": "suite",
    **SHIPPED,
}
"""name -> file"""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
