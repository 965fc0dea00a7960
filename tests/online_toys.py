"""The smallest module that samples: a batch of prompts becomes completions, and these one update. For trials that
interrupt it; what algorithms do in between is tested with them."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from alignment.batches import GroupBatch
from alignment.local_rollout import LocalRollout
from alignment.metrics import Metrics
from alignment.module import PolicyMixin
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.prompting import prompts_of
from alignment.rollout import SamplingConfig
from alignment.stopping import droppable, stop_requested, together
from alignment.update import Counts


class OnlineToy(PolicyMixin):
    """Learns the negative log-probs of two completions per prompt; validation samples greedily."""

    def __init__(
        self, policy: PolicyConfig, optim: OptimConfig | None = None, micro_batch_tokens: int | None = None
    ) -> None:
        super().__init__(policy=policy, optim=optim or OptimConfig(), micro_batch_tokens=micro_batch_tokens)
        self.save_hyperparameters()

    def build_parts(self) -> None:
        self.rollout = LocalRollout(self.policy, pad_id=0, stop_ids=[3], should_stop=partial(stop_requested, self))

    def train_batch(self, batch: GroupBatch) -> None:
        with together(self):
            batch = self._sample(batch, 2, SamplingConfig(max_tokens=40))
        self.update(batch, self.loss, keep_groups=False)

    def validation_step(self, batch: GroupBatch, batch_idx: int) -> None:
        with droppable(self), together(self):
            batch = self._sample(batch, 1, SamplingConfig(max_tokens=40, temperature=0.0))
        super().validation_step(batch, batch_idx)

    def _sample(self, batch: GroupBatch, n: int, sampling: SamplingConfig) -> GroupBatch:
        return self.rollout.generate(prompts_of(batch), n, sampling, seed=self.seed, step=self.batches_seen).batch

    def loss(self, micro: GroupBatch, counts: Counts) -> tuple[Tensor, Metrics]:
        logps = self.engine(micro).logps
        assert logps is not None
        total = -logps[micro.scored].sum()
        return total / counts.tokens, {"loss": (total.detach().double(), micro.scored.sum().double())}


class DeafToy(OnlineToy):
    """Only rank 0 looks up from its rollout."""

    def build_parts(self) -> None:
        super().build_parts()
        if self.trainer.global_rank:
            self.rollout = LocalRollout(self.policy, pad_id=0, stop_ids=[3])
