"""Preference losses without a reference: SimPO, ORPO and CPO.

    S, T = log pi(y_w), log pi(y_l), summed over scored tokens;  s = S / |y_w|, t = T / |y_l|
    SimPO  L = -log sigmoid(beta (s - t) - gamma)
    ORPO   L = NLL - beta log sigmoid(odds(s) - odds(t)),  odds(x) = x - log(1 - e^x)
    CPO    L = NLL - log sigmoid(beta (S - T))

each a mean over pairs. NLL is that of the chosen completions, a mean over their tokens in the whole batch, and can be
added to SimPO too. Meng et al. 2024 (arXiv 2405.14734), Hong et al. 2024 (arXiv 2403.07691), Xu et al. 2024 (arXiv
2401.08417).

Deviations: the NLL of ORPO and CPO is over completions, of all pairs together, as TRL's CPO has it; TRL's ORPO counts
the prompts in, CPO's paper sums over a completion. `hinge` and `ipo` (of s and t) in CPO are TRL's.

Metrics of all three: `loss`, with an NLL also `loss/NAME` and `loss/sft`; `rewards/chosen` (beta times log-prob, a mean
over tokens in SimPO, ORPO and ipo), `rewards/rejected`, `rewards/margins`, `rewards/accuracies` (strict),
`logps/chosen`, `logps/rejected` (summed, nats), `delta`, `beta`. `predict` writes log-probs and rewards of both sides
of each pair.
"""

from __future__ import annotations

from typing import Literal

import lightning as L

from alignment.errors import UserError
from alignment.optim import OptimConfig
from alignment.paired import ReferenceFreeMixin
from alignment.policy import PolicyConfig

OPTIM = OptimConfig(lr=1e-6, warmup_steps=10)


class SimPO(ReferenceFreeMixin, L.LightningModule):
    """Trains a policy on preference pairs by length-normalised log-probs with a margin.

    Args:
        policy: the model to train.
        beta: scale of the reward.
        gamma: margin of reward that is asked for; the authors' code has 0.25 beta.
        label_smoothing: share of labels assumed flipped, below 0.5.
        sft_weight: weight of the NLL of the chosen completions.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    means = True

    def __init__(
        self,
        policy: PolicyConfig,
        beta: float = 2.0,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        sft_weight: float = 0.0,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        self.begin("simpo", beta, label_smoothing, sft_weight, gamma=gamma)


class ORPO(ReferenceFreeMixin, L.LightningModule):
    """Trains a policy on the chosen completions and, by odds ratio, against the rejected.

    Args:
        policy: the model to train; the paper starts from a base model.
        beta: weight of the odds ratio, the paper's lambda.
        sft_weight: weight of the NLL of the chosen completions.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    means = True

    def __init__(
        self,
        policy: PolicyConfig,
        beta: float = 0.1,
        sft_weight: float = 1.0,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        self.begin("orpo", beta, 0.0, sft_weight)


class CPO(ReferenceFreeMixin, L.LightningModule):
    """Trains a policy on preference pairs as DPO with a uniform reference, and on the chosen.

    Args:
        policy: the model to train.
        loss: `sigmoid` (the paper), `hinge` or `ipo`.
        beta: scale of the log-probs.
        label_smoothing: share of labels assumed flipped, below 0.5; for sigmoid.
        sft_weight: weight of the NLL of the chosen completions.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        sft_weight: float = 1.0,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        super().__init__(policy=policy, optim=optim, micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()
        if loss not in ("sigmoid", "hinge", "ipo"):
            raise UserError(f"loss '{loss}' is not one of CPO's; use sigmoid, hinge or ipo")
        self.means = loss == "ipo"
        self.begin(loss, beta, label_smoothing, sft_weight)
