"""Policies that are told what to prefer: each prompt comes with a preference over the rewards, drawn anew every time.

    "[kind 0.7, short 0.3] How long is the warranty?"

A preference is a point of the simplex, drawn from a Dirichlet distribution by (seed, batch number, prompt) and rounded
to what the policy reads. It multiplies the rewards' weights for this prompt, K times over, so that equal shares leave
them as they are. After training the text is a dial: evaluation and serving choose any preference without more of it.

Where the preference stands in the prompt follows Rewards-in-Context (Yang et al. 2024, arXiv 2402.10207), whose prompts
carry the rewards themselves; conditioning a policy on preference weights: Abels et al. 2019 (arXiv 1809.07803).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alignment.batches import Group, GroupBatch
from alignment.errors import UserError
from alignment.randomness import derive

PREFERENCE = "preference"
"""Data column, name -> share, that a prompt's preference travels in; rewards may ask for it too."""

SHARES = "{shares}"


@dataclass(kw_only=True)
class PreferenceConfig:
    """What prompts are told.

    Args:
        concentration: of the Dirichlet distribution; 1 draws every preference alike, less favours single rewards, more
            favours equal shares.
        decimals: digits of a share, in the text and in the weights alike.
        template: text before each prompt, after its BOS; {shares} stands for `NAME SHARE, NAME SHARE, ...`.
        evaluation: name -> share, the preference of all prompts in validation, test and predict; it must sum to 1.
            Null: equal shares.
    """

    concentration: float = 1.0
    decimals: int = 1
    template: str = "[{shares}] "
    evaluation: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.concentration < math.inf:
            raise UserError(f"preferences.concentration is {self.concentration}; it must be above 0")
        if not 1 <= self.decimals <= 4:
            raise UserError(f"preferences.decimals is {self.decimals}; it is between 1 and 4")
        if SHARES not in self.template:
            raise UserError(f"preferences.template '{self.template}' has no {SHARES}: the policy could not know them")


class Preferences:
    """Preferences of prompts over K rewards.

    Args:
        config: see PreferenceConfig. names: of the rewards, at least two. seed: of the run.

    Raises UserError for an evaluation preference that is none over these rewards.
    """

    def __init__(self, config: PreferenceConfig, names: Sequence[str], seed: int) -> None:
        self.config, self.names, self._seed = config, tuple(names), seed
        if len(names) < 2:
            raise UserError("preferences are between rewards, and there is one; leave preferences out")
        given = config.evaluation
        if given is not None:
            if unknown := sorted(set(given) - set(names)):
                raise UserError(f"preferences.evaluation names {', '.join(unknown)}, no reward of {', '.join(names)}")
            if min(given.values()) < 0 or not math.isclose(sum(given.values()), 1, abs_tol=1e-6):
                raise UserError(f"preferences.evaluation is {given}; shares are at least 0 and sum to 1")

    def condition(self, prompts: Sequence[Group], step: int | None, tokenizer: PreTrainedTokenizerBase) -> list[Group]:
        """The prompts with their preferences in front and in the column `preference`; step None: that of evaluation."""
        return [self._told(prompt, self._share(prompt, step), tokenizer) for prompt in prompts]

    def weights(self, batch: GroupBatch, base: Tensor) -> Tensor:
        """[N, K] weights of the rewards for each completion; base [K]: without a preference."""
        shares = [[columns[PREFERENCE][name] for name in self.names] for columns in batch.columns]
        told = torch.tensor(shares, dtype=torch.float64, device=batch.device).reshape(-1, len(self.names))
        return (len(self.names) * told * base.to(told))[batch.group_of]

    def _share(self, prompt: Group, step: int | None) -> list[float]:
        count = len(self.names)
        if step is None:
            given = self.config.evaluation
            return [1 / count] * count if given is None else [float(given.get(name, 0.0)) for name in self.names]
        name: int | str = prompt.index if prompt.index >= 0 else f"content {replace(prompt, completions=()).key}"
        draw = np.random.default_rng(derive(self._seed, "preference", step, name))
        return rounded(draw.dirichlet([self.config.concentration] * count).tolist(), self.config.decimals)

    def _told(self, prompt: Group, shares: Sequence[float], tokenizer: PreTrainedTokenizerBase) -> Group:
        preference = dict(zip(self.names, shares, strict=True))
        text = ", ".join(f"{name} {share:.{self.config.decimals}f}" for name, share in preference.items())
        told = tokenizer.encode(self.config.template.replace(SHARES, text), add_special_tokens=False)
        ids = list(prompt.prompt)
        start = 1 if ids[0] == tokenizer.bos_token_id else 0
        columns: Mapping[str, object] = {**prompt.columns, PREFERENCE: preference}
        return replace(prompt, prompt=[*ids[:start], *told, *ids[start:]], columns=columns)


def rounded(shares: Sequence[float], decimals: int) -> list[float]:
    """Shares of 1 as multiples of 10^-decimals that still sum to 1: by largest remainder, ties to the earlier."""
    units = 10**decimals
    whole = [math.floor(share * units) for share in shares]
    rest = [share * units - floor for share, floor in zip(shares, whole, strict=True)]
    for k in sorted(range(len(shares)), key=lambda k: -rest[k])[: units - sum(whole)]:
        whole[k] += 1
    return [count / units for count in whole]
