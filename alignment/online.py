"""OnlineMixin: modules that learn from what their policy says.

One batch of prompts becomes one optimisation round:

    prompts -> completions (rollout) -> rewards, scored in worker processes while reference log-probs are computed
            -> advantages, over the whole batch and all ranks -> epochs x minibatches updates

An algorithm defines `credit` (rewards to advantages) and `loss`; everything else is here. Sampling is keyed by
(seed, batch number, prompt, completion number) and all state that moves is in the checkpoint, which is written between
two batches, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from alignment import distributed, memory
from alignment import update as engine
from alignment.advantages import RewardTable
from alignment.batches import Group, GroupBatch
from alignment.chat import end_ids
from alignment.errors import UserError
from alignment.experience import (
    ADVANTAGE,
    BEFORE,
    TRUNCATED,
    completion_metrics,
    evaluation_metrics,
    minibatches,
    per_token,
    reward_of,
    sample_rows,
    table_of,
    with_rewards,
)
from alignment.local_rollout import LocalRollout
from alignment.metrics import Metrics, add_metrics, mean_of
from alignment.mismatch import importance_weights, mismatch_metrics
from alignment.objective import IMPORTANCE, OLD_LOGPS
from alignment.optim import SMALL_BATCH, OptimConfig
from alignment.penalised import OnlineReference, PenalisedMixin
from alignment.penalties import EntropyConfig, KLConfig
from alignment.policy import PolicyConfig, base_model
from alignment.policy_losses import mask_truncated
from alignment.prompting import Filled, PromptSource, concatenate, fill, prompts_of, strata_of
from alignment.protocols import FiniteGroups, HasPurpose, SizedBatches
from alignment.reference_sync import ReferenceSync
from alignment.reward_metrics import reward_metrics
from alignment.reward_mishaps import RewardMishaps
from alignment.rewards import RewardSpec, RewardSuite, SuiteConfig, Texts
from alignment.rollout import SAMPLER_LOGPS, RolloutEngine, RolloutStopped, SamplingConfig, times_before
from alignment.rollout_check import advantage_fault, measured_fault
from alignment.settings import as_config
from alignment.stopping import droppable, stop_requested, together
from alignment.vllm_rollout import VLLMRollout, check_settings

log = logging.getLogger(__name__)

EVALUATION = -1
"""Batch number under which evaluation samples: every evaluation draws alike."""
SILENT = 5
"""Batches in a row without any advantage after which that is told."""
_SPLITS: Mapping[TrainerFn, Literal["train", "val", "test", "predict"]] = {
    TrainerFn.FITTING: "train",
    TrainerFn.VALIDATING: "val",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}
"""What is being done -> which prompts are read for it."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Where completions come from, and how they are sampled for evaluation.

    Args:
        max_batch_tokens: most tokens in the cache of the local engine at once, prompts plus `max_tokens` for each
            completion; bounds memory, changes no completion. Null: everything at once.
        vllm: settings of `alignment.vllm_rollout.VLLMRollout` (url, model, weights, folder, ...), to sample from a
            running server. Null: sample from the policy in this process.
        importance_cap: largest weight of a token that the server sampled; weights correct for its other arithmetic.
        eval_completions: completions per prompt in validation and test.
        eval_temperature: temperature there; 0 takes the likeliest token.
    """

    max_batch_tokens: int | None = None
    vllm: dict[str, Any] | None = None
    importance_cap: float = 2.0
    eval_completions: int = 1
    eval_temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.eval_completions < 1 or not 0 <= self.eval_temperature < math.inf or not self.importance_cap > 0:
            raise UserError(
                f"rollout.eval_completions is {self.eval_completions}, eval_temperature {self.eval_temperature} and "
                f"importance_cap {self.importance_cap}; they are at least 1, at least 0, and above 0"
            )
        if self.vllm is not None:
            check_settings(self.vllm)


SAMPLING, ROLLOUT, SCORING = SamplingConfig(), RolloutConfig(), SuiteConfig()
KL, BONUS = KLConfig(), EntropyConfig()
OPTIM = OptimConfig(lr=1e-6)


class OnlineMixin(PenalisedMixin):
    """Base of modules that sample completions and learn from rewards.

    Args:
        policy: the model to train.
        rewards: name -> reward: its import path, or a specification with weight, scale, condition and time limit.
        completions: sampled per prompt.
        sampling: how they are drawn.
        rollout: where they come from, and how validation samples.
        scoring: worker processes of the rewards and what to do when they fail.
        epochs: passes over each rollout.
        minibatches: optimizer steps per pass; each takes an even share of the prompts.
        kl: divergence from the reference, in the loss or in the reward.
        entropy: bonus for it, and training on high-entropy tokens only.
        mask_truncated: do not train on completions that the length limit ended; they still count in advantages.
        dynamic_sampling: draw other prompts, at most this many times, in place of groups in which no reward that has a
            weight differs. 0: off.
        success: the reward that measures success, in [0, 1], for re-grading prompts. Null: the first one.
        reference: what the policy is compared with: LoRA's `adapter_off` or `frozen_adapter`, a `copy`, its codes in
            `fp8`, or `auto`: the cheapest. Loaded only for a KL.
        reference_sync: how the reference follows the policy, {alpha: 0.6, every: 512} for example. Null: it stays.
        optim: optimizer and schedule.
        micro_batch_tokens: upper bound of tokens in one forward; bounds memory, changes no result.
    """

    reads = "prompts"
    shown = ("loss", "reward")
    loss_terms: Mapping[str, float] = {}

    rollout: RolloutEngine

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        completions: int = 8,
        sampling: SamplingConfig = SAMPLING,
        rollout: RolloutConfig = ROLLOUT,
        scoring: SuiteConfig = SCORING,
        epochs: int = 1,
        minibatches: int = 1,
        kl: KLConfig = KL,
        entropy: EntropyConfig = BONUS,
        mask_truncated: bool = False,
        dynamic_sampling: int = 0,
        success: str | None = None,
        reference: OnlineReference = "auto",
        reference_sync: ReferenceSync | None = None,
        optim: OptimConfig = OPTIM,
        micro_batch_tokens: int | None = 4096,
    ) -> None:
        self.sampling = as_config(SamplingConfig, sampling)
        super().__init__(
            policy=policy,
            temperature=self.sampling.score_temperature,
            kl=kl,
            entropy=entropy,
            reference=reference,
            reference_sync=reference_sync,
            optim=optim,
            micro_batch_tokens=micro_batch_tokens,
        )
        for name, value in (("completions", completions), ("epochs", epochs), ("minibatches", minibatches)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if dynamic_sampling < 0:
            raise UserError(f"dynamic_sampling is {dynamic_sampling}; it is the largest number of refills, or 0")
        self.completions, self.epochs, self.minibatches = completions, epochs, minibatches
        self.updates_per_batch = epochs * minibatches
        self.rollout_config = as_config(RolloutConfig, rollout)
        self.suite = RewardSuite(rewards, scoring, seed=self.seed)
        self.success = success or self.suite.names[0]
        if self.success not in self.suite.names:
            raise UserError(f"success names '{success}', which is no reward; there are {', '.join(self.suite.names)}")
        self.samples_itself = self.rollout_config.vllm is None
        self.mask_truncated, self.dynamic_sampling = mask_truncated, dynamic_sampling
        self._pushed: int | None = None
        self._warned: set[str] = set()
        self._silent = 0  # batches in a row without any advantage
        self.mishaps = RewardMishaps()

    # ------------------------------------------------------------------ what an algorithm defines

    def credit(self, batch: GroupBatch, table: RewardTable) -> GroupBatch:
        """A copy of the whole batch with the row tensor `advantage` [N] and whatever else `loss` reads; completions
        that must not be trained on are unscored. A collective: every rank calls it, also with an empty batch."""
        raise TypeError(f"{type(self).__name__} must define credit(batch, table)")

    def pose(self, prompts: Sequence[Group], step: int | None) -> Sequence[Group]:
        """The prompts as the policy reads them: a function of prompt and batch number (None in evaluation) alone."""
        return prompts

    def update_part(self, part: GroupBatch) -> None:
        """One update from one minibatch."""
        self.update(part, self.loss, keep_groups=False)

    # ------------------------------------------------------------------ building

    def prepare_data(self) -> None:
        """Have the rewards say what they lack while the run has no folder, no tracker and no model yet."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, FiniteGroups) and isinstance(data, HasPurpose) and data.purpose == self.reads:
            assert self.trainer.state.fn is not None
            self.suite.check_columns(group.columns for group in data.groups(_SPLITS[self.trainer.state.fn]))

    def setup(self, stage: str) -> None:
        try:
            super().setup(stage)
            if stage == "fit":
                self._check_fit()
        except UserError:
            self.suite.close()  # started by `prepare_data`; no teardown follows
            raise

    def _check_fit(self) -> None:
        if self.sampling.greedy:
            raise UserError(
                "sampling.temperature is 0: all completions of a prompt would be the same, and nothing is learned from "
                "that; train at a temperature above 0 (evaluation has its own, rollout.eval_temperature)"
            )
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, SizedBatches) and self.minibatches > data.batch_size:
            raise UserError(
                f"minibatches is {self.minibatches} and data.batch_size {data.batch_size}; a minibatch needs a prompt "
                "at least"
            )

    def build_parts(self) -> None:
        super().build_parts()
        config, inner = self.rollout_config, base_model(self.policy)
        settings = inner.generation_config
        stop = end_ids(self.tokenizer, inner.config.eos_token_id, settings.eos_token_id if settings else None)
        if config.vllm is not None:
            self.rollout = VLLMRollout(
                **config.vllm, stop_ids=stop, device=self.target_device, should_stop=self._asked_to_leave
            )
        else:
            pad = self.tokenizer.pad_token_id
            assert isinstance(pad, int), "load_tokenizer makes sure of a padding token"
            self.rollout = LocalRollout(
                self.policy,
                pad_id=pad,
                stop_ids=stop,
                max_batch_tokens=config.max_batch_tokens,
                should_stop=self._asked_to_leave,
            )

    def memory_plan(self, trainer: L.Trainer) -> memory.Plan:
        plan = super().memory_plan(trainer)
        longest = (plan.row_tokens or 0) + self.completions * self.sampling.max_tokens
        tokens = plan.micro_batch_tokens if self.micro_batch_tokens is not None else longest * self._prompts_per_batch()
        return replace(plan, micro_batch_tokens=tokens, row_tokens=longest, reference=self.planned_reference())

    def _prompts_per_batch(self) -> int:
        return int(getattr(self.trainer.datamodule, "batch_size", 1))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ training

    def train_batch(self, batch: GroupBatch) -> None:
        experience = self.collect(batch)
        if experience is None:
            return
        for _ in range(self.epochs):
            for part in minibatches(experience, self.minibatches):
                if 0 <= self.trainer.max_steps <= self.trainer.global_step:
                    return
                self.update_part(part)

    def collect(self, batch: GroupBatch) -> GroupBatch | None:
        """Completions for the prompts of `batch`, with rewards, advantages and the log-probs that updates need. None
        for a rollout of which something is not finite on any rank: it counts as one update that is left out.

        Raises RolloutStopped when the run was asked to leave meanwhile; nothing that a checkpoint holds has changed.
        """
        metrics: Metrics = {}
        before = self.suite.state_dict()
        try:
            sampled, experience = self._experience(prompts_of(batch), metrics)
        except RolloutStopped:
            self.suite.load_state_dict(before)  # dynamic sampling may have scored some groups already
            raise
        self._tell_success(sampled)
        add_metrics(metrics, completion_metrics(experience))
        table = table_of(experience, self.suite.names, self.suite.weights)
        measured, scored = self._fault(experience), experience.scored
        experience = self.credit(experience, table)
        if self._unusable(experience, measured):
            self._train_window.update(metrics)
            engine.leave_out(self, replace(experience, scored=scored))
            return None
        add_metrics(metrics, self._reward_metrics(experience, table))
        if self.mask_truncated:
            experience = mask_truncated(experience, experience.rows[TRUNCATED].bool())
        metrics["frac_masked_seq"] = mean_of((experience.scored_lengths() == 0).double())
        experience = self.keep_high_entropy(experience)
        add_metrics(metrics, self.follow(experience))
        self._train_window.update(metrics)
        if self.updates_per_batch == 1 and self.samples_itself:
            # The only update starts at the policy that sampled, so the ratio is 1 whatever rounding or dropout do.
            experience = replace(experience, tokens={n: v for n, v in experience.tokens.items() if n != OLD_LOGPS})
        return experience

    def _fault(self, batch: GroupBatch) -> Tensor:
        """[] bool: whether what was measured, or what the reward is charged with, is not finite."""
        found = measured_fault(batch)
        if not self.kl.in_reward:
            return found
        return found | ~(self.kl.coefficient * self.rollout_kl(batch)).isfinite().all()

    def _unusable(self, batch: GroupBatch, measured: Tensor) -> bool:
        """Whether a rollout cannot be learned from because something is not finite. Warns once when the rewards have
        taught nothing for a while. A collective."""
        flags = torch.stack([(batch.rows[ADVANTAGE] != 0).any(), measured | advantage_fault(batch)])
        told, unusable = (bool(count > 0) for count in distributed.all_reduce_sum(flags.double()).tolist())
        self._silent = 0 if told else self._silent + 1
        if self._silent == SILENT:
            self.warn_once(
                f"in {SILENT} batches in a row no completion had an advantage, so the rewards teach nothing: within "
                "each prompt all completions got the same. Look at rewards/NAME/mean and at the samples "
                "(callbacks.Samples), then at 'When it does not learn' in docs/online.md"
            )
        return unusable

    def _experience(self, prompts: Sequence[Group], metrics: Metrics) -> tuple[GroupBatch, GroupBatch]:
        """(everything that was sampled, with rewards; what is left to train on, measured)."""
        self._sync()
        if not self.dynamic_sampling:
            experience = self._score(prompts, metrics, measure=True)
            return experience, experience
        source = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(source, PromptSource):
            raise UserError("dynamic_sampling asks the data for other prompts, which only datamodules.PromptData gives")
        rolled: list[GroupBatch] = []

        def roll(share: Sequence[Group], attempt: int) -> tuple[GroupBatch, Tensor]:
            batch = self._score(share, metrics, measure=False)
            rolled.append(batch)
            differs = table_of(batch, self.suite.names, self.suite.weights).informative()
            return batch, differs[:, self.suite.weights.to(differs.device) != 0].any(dim=1)

        filled = fill(prompts, roll, source, step=self.batches_seen, attempts=self.dynamic_sampling)
        add_metrics(metrics, _dynamic_metrics(filled))
        return concatenate(rolled), self._measured(filled.batch, metrics)

    def _asked_to_leave(self) -> bool:
        return stop_requested(self)

    def _sync(self) -> None:
        """Give the engine the current weights, once per batch. A collective where they go to a server."""
        if self._pushed != self.batches_seen:
            self.rollout.sync(self.policy, self.batches_seen)
            self._pushed = self.batches_seen

    def _sample(self, prompts: Sequence[Group], n: int, sampling: SamplingConfig, step: int) -> GroupBatch:
        """A collective, before anything that may stop."""
        prompts = self.pose(prompts, None if step == EVALUATION else step)
        found = self.rollout.generate(prompts, n, sampling, seed=self.seed, step=step, earlier=times_before(prompts))
        return found.batch.with_rows(**{TRUNCATED: found.truncated.float()})

    def _score(self, prompts: Sequence[Group], metrics: Metrics, *, measure: bool) -> GroupBatch:
        """Sample and score. Rewards are computed while the reference's and the policy's log-probs are."""
        with together(self):
            batch = self._sample(prompts, self.completions, self.sampling, self.batches_seen)
            pending = self.suite.submit(_Scored(batch), Texts.decode(batch, self.tokenizer))
            try:
                batch = self._measured(batch, metrics) if measure else batch
                pending.wait(self._asked_to_leave)
            except BaseException:
                pending.cancel()
                raise
        matrix = pending.collect()
        self.mishaps.note(batch, matrix)
        # Means and deviations come from `reward_metrics`, over all ranks.
        found = matrix.metrics()
        add_metrics(metrics, {n: pair for n, pair in found.items() if not n.endswith(("/mean", "/std"))})
        return with_rewards(batch, matrix)

    def _measured(self, batch: GroupBatch, metrics: Metrics) -> GroupBatch:
        """With what `measure` gives for each token."""
        if self.kl.needs_reference or self.measures_policy:
            batch = batch.with_tokens(**per_token(batch, self.measure, self.micro_batch_tokens, self))
        if self.updates_per_batch > 1 and not self.measures_policy:
            batch = batch.with_tokens(**{OLD_LOGPS: batch.tokens[SAMPLER_LOGPS]})
        if self.rollout_config.vllm is not None and OLD_LOGPS in batch.tokens:
            old, cap = batch.tokens[OLD_LOGPS], self.rollout_config.importance_cap
            add_metrics(metrics, mismatch_metrics(batch, old, cap=cap))
            batch = batch.with_tokens(**{IMPORTANCE: importance_weights(batch, old, cap=cap)})
        return batch

    def _tell_success(self, sampled: GroupBatch) -> None:
        source = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(source, PromptSource):
            source.observe(sampled, reward_of(sampled, self.success).clamp(0.0, 1.0))

    def _reward_metrics(self, batch: GroupBatch, table: RewardTable) -> Metrics:
        strata = labels if any(labels := strata_of(batch)) else None
        return reward_metrics(table, batch.rows[ADVANTAGE], self.suite.names, strata, batch.rows.get(BEFORE))

    def note_batch_size(self, groups: float) -> None:
        """Completions count here, not prompts."""
        if not self._batch_size_noted and 0 < groups * self.completions < SMALL_BATCH and distributed.rank() == 0:
            log.warning(
                "an update of about %d completions: below %d gradients are noisy (data.batch_size, model.completions)",
                groups * self.completions,
                SMALL_BATCH,
            )
        self._batch_size_noted = self._batch_size_noted or groups > 0

    def warn_once(self, message: str) -> None:
        if message and message not in self._warned and distributed.rank() == 0:
            log.warning("%s", message)
        self._warned.add(message)

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.judge(batch)

    def test_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.judge(batch)

    def predict_step(self, batch: GroupBatch, batch_idx: int) -> list[dict[str, Any]]:
        return self.judge(batch)

    @torch.no_grad()
    def judge(self, batch: GroupBatch) -> list[dict[str, Any]]:
        """Sample for the prompts as evaluation does, score, and take the metrics in. Returns what was said, a row for
        each completion (`alignment.experience.sample_rows`). A collective."""
        config = self.rollout_config
        sampling = replace(self.sampling, temperature=config.eval_temperature)
        self._sync()
        with droppable(self), together(self):
            sampled = self._sample(prompts_of(batch), config.eval_completions, sampling, EVALUATION)
            texts = Texts.decode(sampled, self.tokenizer)
            pending = self.suite.submit(_Scored(sampled), texts, learn=False)
            pending.wait(self._asked_to_leave)
        matrix = pending.collect()
        self.mishaps.note(sampled, matrix)
        self._eval_window.update(evaluation_metrics(sampled, matrix))
        return sample_rows(sampled, matrix, texts)

    # ------------------------------------------------------------------ life and state

    def teardown(self, stage: str) -> None:
        self.suite.close()

    def training_state(self) -> dict[str, Any]:
        return {**super().training_state(), "rewards": self.suite.state_dict()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        self.suite.load_state_dict(state["rewards"])


@dataclass(frozen=True, slots=True)
class _Scored:
    """What rewards read of a rollout."""

    batch: GroupBatch

    @property
    def truncated(self) -> Tensor:
        return self.batch.rows[TRUNCATED].bool()


def _dynamic_metrics(filled: Filled) -> Metrics:
    """Groups of a batch, over all ranks: sampled, dropped for want of a signal, still lacking at the end."""
    one = torch.ones((), dtype=torch.float64)
    values = {"sampled": filled.sampled, "dropped": filled.dropped, "lacking": filled.lacking}
    return {f"dynamic_sampling/{name}": (one * float(value), one) for name, value in values.items()}
