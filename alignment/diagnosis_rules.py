"""What can go wrong in a run, as data: the signals of each fault, its likely cause, and the settings to change.

No rule speaks on one signal alone: it takes two metrics, or, where a run logs only one, that one over two windows in a
row (`cases` says which: the first case whose metrics are there is asked). Settings are keys of the command line. A rule
`each` reward is asked for one after another.

Limits come from what others use and publish:
    rldoctor 0.2     dead groups 0.30, 0.50, 0.75; clip share 0.10, 0.20, 0.40; KL 0.5, 2.0 nats a token; gap 0.15, 0.30
    rlprobe 0.1      entropy below 0.25 nats; dead groups 0.4; clip share 0.3; truncation 0.5
    rlwatch 0.5      an entropy of 1.0 as a floor gives false alarms on calm models: fall and level are both asked here
    stabilityguard   gradients ten times their average
    papers           beside each rule
"""

from __future__ import annotations

from dataclasses import dataclass

from alignment.diagnosis_known import Signal
from alignment.diagnosis_rewards import Constant, Diverges, FallsAgainst, HeldOut, OthersRise, Still, Stuck, Unmoved
from alignment.diagnosis_signals import Above, Below, Drops, Falls, Near, Regrows, Rises, Spike, all_of, any_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to change: a key of the command line, and how."""

    key: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fault.

    Args:
        name: of the metric `doctor/NAME`. says: the fault in a few words. cause: what is likely behind it.
        settings: what to change, the likeliest first.
        cases: each the signals that must all see something. The first whose metrics are there is asked.
        each: whether it is asked for every reward, with `NAME` standing for it.
    """

    name: str
    says: str
    cause: str
    settings: tuple[Setting, ...]
    cases: tuple[tuple[Signal, ...], ...]
    each: bool = False


REPETITION = 0.3
"""Share of repeated 4-grams in a completion. Welleck et al. 2020 (arXiv 1908.04319), seq-rep-4: 0.44 of degenerate
greedy text, 0.005 of human text."""
TRUNCATION = 0.5
TOKEN_KL = 2.0
COMPLETION_KL = 100.0
"""Nats per completion, where no KL per token is logged: beyond the distances at which Gao et al. 2022 (arXiv
2210.10760) find the true reward to fall."""
LATE = 30
"""Rows before a run may be said to do nothing: a schedule has warmed up by then."""

_NO_BETTER = any_of(Still(), Drops(metric="reward"))
_REPEATS = all_of(
    Above(metric="completions/repetition", limit=REPETITION), Rises(metric="completions/repetition", by=0.1)
)

RULES: tuple[Rule, ...] = (
    # Gao et al. 2022 (arXiv 2210.10760); length: Singhal et al. 2023 (arXiv 2310.03716).
    Rule(
        name="reward_hacking",
        says="the reward rises, and what it stands for does not",
        cause="the policy has found what the reward likes beside what was meant: read the samples (callbacks.Samples)",
        settings=(
            Setting(key="model.kl.coefficient", how="raise it: the start of training holds the policy back"),
            Setting(key="model.rewards", how="add one for what is lost, or a condition (RepetitionPenalty, length)"),
            Setting(key="model.optim.lr", how="lower it, and stop at the checkpoint of the best held-out reward"),
        ),
        cases=(
            (
                Rises(metric="reward"),
                any_of(
                    Diverges(up="reward", down="val/reward"),
                    HeldOut(up="reward"),
                    Diverges(up="reward", down="reward/length_controlled"),
                    _REPEATS,
                ),
            ),
        ),
    ),
    # Cui et al. 2025 (arXiv 2505.22617): reward is bought with entropy; DAPO, Yu et al. 2025 (arXiv 2503.14476).
    Rule(
        name="entropy_collapse",
        says="the policy has lost its entropy, and the reward is no better for it",
        cause="all completions of a prompt become the same, so there is nothing left to learn from",
        settings=(
            Setting(key="model.entropy.coefficient", how="raise it (0.01), or set model.entropy.target"),
            Setting(key="model.kl.coefficient", how="raise it if the policy left its start, else lower it"),
            Setting(key="model.loss", how="clip_higher leaves more room for unlikely tokens (GRPO, PPO)"),
            Setting(key="model.optim.lr", how="lower it"),
        ),
        cases=(
            (
                Below(metric="entropy", limit=0.3),
                Falls(metric="entropy", factor=0.25),
                any_of(Stuck(), Drops(metric="reward"), _REPEATS),
            ),
        ),
    ),
    Rule(
        name="over_conservative",
        says="the policy stays where it was: no distance from its start, and no more reward",
        cause="what holds it back is stronger than what it learns, or its steps are too small",
        settings=(
            Setting(key="model.kl.coefficient", how="lower it"),
            Setting(key="model.optim.lr", how="raise it"),
            Setting(key="model.entropy.coefficient", how="raise it, if the completions of a prompt are all alike"),
        ),
        cases=(
            (
                Below(metric="kl", limit=1e-3, points=LATE),
                Near(metric="ratio", value=1.0, distance=0.01),
                Stuck(points=LATE),
            ),
            (Below(metric="kl", limit=1e-3, points=LATE), Stuck(points=LATE)),
            (Below(metric="objective/kl", limit=1e-2, points=LATE), Stuck(points=LATE)),
        ),
    ),
    Rule(
        name="over_conservative_pairs",
        says="the policy stays where it was: no distance from its reference, and no larger margins",
        cause="what holds it back is stronger than what it learns, or its steps are too small",
        settings=(
            Setting(key="model.beta", how="lower it"),
            Setting(key="model.optim.lr", how="raise it"),
        ),
        cases=(
            (
                Below(metric="kl/data", limit=1e-2, points=LATE),
                Stuck(metric="rewards/margins", points=LATE, least=0.01),
            ),
        ),
    ),
    # A level alone is no fault: a reward may be worth any distance (Ziegler et al. 2019, arXiv 1909.08593).
    Rule(
        name="kl_runaway",
        says="the policy runs away from its start",
        cause="nothing holds it, or its steps are too large",
        settings=(
            Setting(key="model.kl.coefficient", how="raise it, or hold a distance with model.kl.target"),
            Setting(key="model.optim.lr", how="lower it"),
            Setting(key="model.optim.clip_norm", how="set it (1.0)"),
        ),
        cases=(
            (
                Above(metric="kl", limit=TOKEN_KL),
                any_of(_NO_BETTER, Falls(metric="entropy", factor=0.25), _REPEATS),
            ),
            (
                Above(metric="objective/kl", limit=COMPLETION_KL),
                any_of(_NO_BETTER, Falls(metric="entropy", factor=0.25), _REPEATS),
            ),
        ),
    ),
    # DAPO's dynamic sampling answers it (arXiv 2503.14476).
    Rule(
        name="dead_groups",
        says="most prompts give no signal: their completions all get the same reward, and it does not rise",
        cause="the prompts are too hard or too easy for this policy, or the reward is too coarse to tell answers apart",
        settings=(
            Setting(key="model.dynamic_sampling", how="3: other prompts in place of those"),
            Setting(key="data.strata", how="mix difficulties"),
            Setting(key="model.completions", how="more of each prompt, so that one of them differs"),
            Setting(key="model.rewards", how="partial credit"),
        ),
        cases=((Above(metric="frac_reward_zero_std", limit=0.5), Stuck()),),
    ),
    # Schulman et al. 2017 (arXiv 1707.06347); OpenAI's Spinning Up ends a rollout's updates at a KL of about 0.01.
    Rule(
        name="clip_saturation",
        says="updates leave the policy that sampled: many tokens are outside of the clip range",
        cause="too many or too large steps are made of each rollout",
        settings=(
            Setting(key="model.optim.lr", how="lower it"),
            Setting(key="model.minibatches", how="fewer"),
            Setting(key="model.epochs", how="fewer"),
        ),
        cases=(
            (
                Above(metric="clip_ratio/region_mean|policy/clipfrac_avg", limit=0.2),
                Above(metric="policy/approxkl_avg", limit=0.01),
            ),
            (Above(metric="clip_ratio/region_mean|policy/clipfrac_avg", limit=0.2, windows=2),),
        ),
    ),
    # Growth that pays, as of reasoning, is no fault. Loss that favours a length: Liu et al. 2025 (arXiv 2503.20783).
    Rule(
        name="length_drift",
        says="completions get longer or shorter, and the reward is no better for it",
        cause="the loss or the reward favours a length, not an answer",
        settings=(
            Setting(key="model.rewards", how="SoftOverlong or LengthWithin bound the length"),
            Setting(key="model.reduction", how="token_mean or const: a mean per sequence favours long wrong answers"),
            Setting(key="model.kl.coefficient", how="raise it"),
        ),
        cases=(
            (
                any_of(
                    Rises(metric="completions/mean_length", factor=1.5),
                    Falls(metric="completions/mean_length", factor=0.5),
                ),
                _NO_BETTER,
            ),
        ),
    ),
    Rule(
        name="truncation",
        says="most completions are cut off by the length limit",
        cause="answers need more room, or the policy has not learned to end",
        settings=(
            Setting(key="model.sampling.max_tokens", how="raise it"),
            Setting(key="model.mask_truncated", how="true: what is cut off teaches nothing"),
            Setting(key="model.rewards", how="SoftOverlong pays for ending in time"),
        ),
        cases=(
            (
                Above(metric="completions/clipped_ratio", limit=TRUNCATION),
                any_of(
                    Above(metric="val/completions/clipped_ratio", limit=TRUNCATION),
                    Above(metric="completions/filled", limit=0.75),
                ),
            ),
            (Above(metric="completions/clipped_ratio", limit=TRUNCATION, windows=2),),
        ),
    ),
    # Welleck et al. 2020 (arXiv 1908.04319).
    Rule(
        name="repetition",
        says="completions repeat themselves",
        cause="the reward pays for it, or the policy has collapsed onto a loop",
        settings=(
            Setting(key="model.rewards", how="add RepetitionPenalty"),
            Setting(key="model.kl.coefficient", how="raise it"),
            Setting(key="model.entropy.coefficient", how="raise it"),
        ),
        cases=(
            (
                Above(metric="completions/repetition", limit=REPETITION),
                any_of(
                    Falls(metric="entropy", factor=0.5),
                    Drops(metric="val/reward"),
                    Rises(metric="completions/mean_length", factor=1.3),
                ),
            ),
            (Above(metric="completions/repetition", limit=REPETITION, windows=2),),
        ),
    ),
    # Below 0 a critic is worse than a constant: Huang et al. 2022, "The 37 implementation details of PPO".
    Rule(
        name="critic_divergence",
        says="the critic gets worse: it explains nothing of the returns, and its loss rises",
        cause="the returns move faster than the critic learns, or the policy's gradient drowns its own",
        settings=(
            Setting(key="model.value_coefficient", how="raise it"),
            Setting(key="model.critic.kind", how="copy: a trunk of its own"),
            Setting(key="model.optim.lr", how="lower it"),
            Setting(key="model.value_clip", how="a wider one"),
        ),
        cases=(
            (Below(metric="explained_variance", limit=0.0), Regrows(metric="loss/value_avg", factor=1.5)),
            (Regrows(metric="loss/value_avg", factor=2.0, windows=2),),
        ),
    ),
    # Razin et al. 2024 (arXiv 2410.08847), likelihood displacement; Pal et al. 2024 (arXiv 2402.13228); the SFT term is
    # that of Pang et al. 2024 (arXiv 2404.19733).
    Rule(
        name="chosen_logp_falls",
        says="the chosen completions get less likely while the margins grow",
        cause="pushing the rejected ones down takes the chosen ones along, and something else becomes likely",
        settings=(
            Setting(key="model.sft_weight", how="add the chosen ones' own likelihood to the loss (0.2 to 1)"),
            Setting(key="model.beta", how="raise it"),
            Setting(key="model.optim.lr", how="lower it"),
        ),
        cases=(
            (
                Rises(metric="rewards/margins", by=0.1),
                FallsAgainst(metric="rewards/chosen", other="rewards/margins", share=0.5),
            ),
        ),
    ),
    # Chowdhery et al. 2022 (arXiv 2204.02311), section 5.1.
    Rule(
        name="loss_spike",
        says="the loss jumped, with the gradient",
        cause="a batch unlike the others, or steps too large for where the weights are",
        settings=(
            Setting(key="model.optim.clip_norm", how="set it, or lower it (1.0)"),
            Setting(key="model.optim.lr", how="lower it, or a longer model.optim.warmup_steps"),
            Setting(key="data.path", how="look at the batch of that step"),
        ),
        cases=((Spike(metrics=("loss", "grad_norm")),), (Spike(metrics=("loss",), rows=2),)),
    ),
    # Mohan et al. 2020 (arXiv 2007.06775), data stalls; Murray et al. 2021 (arXiv 2101.12127): a third of the time is
    # where jobs count as bound by their input.
    Rule(
        name="data_bound",
        says="training waits for its data",
        cause="batches are made more slowly than they are used",
        settings=(
            Setting(key="data.num_workers", how="raise it: processes that make batches ahead (2 to 4 per device)"),
            Setting(key="data.cache_dir", how="a fast local disk"),
            Setting(key="data.batch_size", how="a larger one, so that each step takes longer than its batch"),
        ),
        cases=(
            (
                Above(metric="time/data_share", limit=1 / 3, windows=2),
                Above(metric="time/data_seconds", limit=0.05),
            ),
        ),
    ),
    Rule(
        name="ranks_disagree",
        says="the processes no longer hold the same weights",
        cause="gradients were not reduced over all of them (a parameter outside of the update, a hook, a dropped "
        "all-reduce), or they started from different weights",
        settings=(
            Setting(key="trainer.strategy", how="ddp, and gradients through module.update alone: check the all-reduce"),
            Setting(key="trainer.devices", how="1 shows whether the fault goes with the number of processes"),
            Setting(key="seed_everything", how="one seed for all, so that new weights are alike"),
        ),
        cases=(
            (
                Above(metric="ranks/parameters_differ", limit=0.0),
                any_of(
                    Above(metric="ranks/grad_norm_spread", limit=1e-6),
                    Above(metric="ranks/parameters_differ", limit=0.0, windows=2),
                ),
            ),
        ),
    ),
    Rule(
        name="constant_reward",
        says="the reward NAME is the same for every completion",
        cause="it fails quietly, reads the wrong column, or does not fit these prompts",
        settings=(
            Setting(key="model.rewards", how="mend NAME, or leave it out"),
            Setting(key="model.sampling.temperature", how="higher, if the completions themselves are all alike"),
        ),
        cases=(
            (Constant(metric="rewards/NAME/mean"), Constant(metric="rewards/NAME/std", value=0.0)),
            (Constant(metric="rewards/NAME/mean"), Constant(metric="adv/zero_std/NAME", value=1.0)),
        ),
        each=True,
    ),
    # GDPO (arXiv 2601.05242): summing lets one reward drown another.
    Rule(
        name="reward_never_moves",
        says="the reward NAME differs between completions and does not move, while others rise",
        cause="the other rewards outweigh it, or the policy cannot reach it",
        settings=(
            Setting(key="model.rewards", how="a larger weight for NAME, or a condition of the others on it"),
            Setting(key="model.advantage", how="gdpo: each reward is normalised by itself"),
            Setting(key="trainer.callbacks", how="callbacks.FocusReward trains one head alone (modules.DecoupledPO)"),
        ),
        cases=(
            (
                Unmoved(metric="rewards/NAME/mean", deviation="rewards/NAME/std", points=LATE),
                Below(metric="adv/zero_std/NAME", limit=0.5),
                OthersRise(),
            ),
            (
                Unmoved(metric="rewards/NAME/mean", deviation="rewards/NAME/std", points=LATE),
                OthersRise(),
            ),
        ),
        each=True,
    ),
)

NAMES = tuple(rule.name for rule in RULES)
