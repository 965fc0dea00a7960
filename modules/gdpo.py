"""Group reward-decoupled normalisation policy optimisation (Liu et al. 2026, arXiv 2601.05242), for several rewards.

    A_k = (r_k - mean_g r_k) / (std_g r_k + eps)        every reward k by itself, within its group     (equation 4)
    S   = sum_k w_k A_k                                 weights act on what is normalised              (equation 7)
    A   = (S - mean S) / (std S + eps)                  over all completions of the batch              (equation 6)
    L   = that of GRPO, any of its losses

GRPO sums first: completions with rewards (1, 0) and (0, 1) are then alike, and a reward of small spread drowns in one
of large spread. Here a reward's unit and offset do not matter, so a factor inside a reward does nothing and its weight
does. What this cannot do, and what the paper overstates, is in docs/multi_reward.md.

The policy with one head per reward, which others call by the same letters, is `modules.DecoupledPO`.

Beyond the paper: a reward may abstain and is then missing from S; a reward that does not differ in a group is exactly 0
there, whatever its rounding; one reward alone is GRPO, without the third line. A conditioned reward (equation 8) is the
`condition` of its specification, applied before anything is normalised.

KL to the reference belongs in the loss, where it is by default, with the coefficient of GRPO. With `kl.place: reward`
it is not one more reward to normalise, which would turn its coefficient into a mere weight: coefficient times the
completion's KL, centred in its group, is subtracted from A. The authors' code for verl subtracts KL from rewards that
its GDPO never reads, so their runs there had none.
"""

from __future__ import annotations

from typing import Any, get_args

from alignment.advantages import Whiten
from alignment.errors import UserError
from alignment.policy import PolicyConfig
from alignment.rewards import RewardSpec
from modules.grpo import GRPO


class GDPO(GRPO):
    """Trains a policy on several rewards, each normalised by itself.

    Metrics: those of GRPO. Under `adv/`: `zero_std/NAME`, the share of groups in which a reward does not differ;
    `corr/NAME`, the correlation of the final advantage with it; `before/...` and `after/...`, the size of advantages
    around the normalisation over the batch; `batch_std`, the deviation of S; `distinct`; `active_groups`.

    Args:
        policy: the model to train; it is its own reference before the first step.
        rewards: name -> reward; see docs/rewards.md. Weights multiply normalised advantages.
        whiten: normalisation over the batch: over its completions (`sequence`), over their tokens as verl does
            (`token`: long completions weigh more), or `none`.
        eps: added to a reward's deviation within the group. 0 makes advantages exactly invariant to a reward's unit.
        batch_eps: added to the deviation over the batch (under `token`: to the variance). Null: `eps` (1e-8).
        settings: those of GRPO but its advantage; see modules.GRPO and alignment.online.OnlineMixin.
    """

    fixed = ("advantage", "advantage_args")

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        whiten: Whiten = "sequence",
        eps: float = 1e-4,
        batch_eps: float | None = None,
        **settings: Any,
    ) -> None:
        if whiten not in get_args(Whiten):
            raise UserError(f"whiten is '{whiten}'; use {', '.join(get_args(Whiten))}")
        if not eps >= 0 or (batch_eps is not None and not batch_eps >= 0):
            raise UserError(f"eps is {eps} and batch_eps {batch_eps}; they are at least 0")
        if given := sorted(set(self.fixed) & set(settings)):
            raise UserError(f"{' and '.join(given)} cannot be set: GDPO is an advantage; use modules.GRPO for another")
        super().__init__(
            policy=policy,
            rewards=rewards,
            advantage="gdpo",
            advantage_args={"whiten": whiten, "eps": eps, "batch_eps": batch_eps},
            **settings,
        )
        self.save_hyperparameters(ignore=self.fixed)
