"""HeadedMixin: online modules whose policy is made of one head per reward (`alignment.heads`).

What belongs to the heads and not to the objective is here: building them, routes of gradients, each head's own KL, when
heads step and how they are clipped, batches that belong to one head alone, and the state of all that. A module adds
advantages and losses (`modules.DecoupledPO`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from alignment import distributed
from alignment.advantages import Decoupled, divided
from alignment.batches import GroupBatch
from alignment.errors import UserError
from alignment.experience import REF_LOGPS
from alignment.fusion_profile import FusionProfile
from alignment.head_config import BudgetConfig, ColdStartConfig, FusionConfig, HeadsConfig
from alignment.head_steps import HeadSteps
from alignment.heads import Headless, Heads, HeadsSpec, lm_head_of, preference
from alignment.heads_file import SavedHeads
from alignment.kl import KL_ESTIMATORS, kl_metric, token_kl
from alignment.lm_head import score_tokens
from alignment.logprobs import TokenStats
from alignment.metrics import Metrics, mean_of
from alignment.online import OnlineMixin
from alignment.own_kl import PLACE, OwnKL
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.prompting import prompts_of
from alignment.randomness import derive
from alignment.rewards import RewardSpec
from alignment.rollout import completion_keys
from alignment.routes import Routed, route, together
from alignment.schedulable import Moved
from alignment.settings import as_config, plain
from alignment.spread import clip_gradients
from alignment.tally import Tally
from alignment.update import Counts, total_norm

log = logging.getLogger(__name__)

FAR = 1.0
"""Distance of a sub-policy's state from the trunk's, relative to its length, from which on there is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a micro-batch's tokens look like under the policy.

    Args:
        routed: of the scored tokens. logps: [R, C] along the routes, 0 at unscored tokens.
        stats: log-probs, entropies and, for a KL over the vocabulary, states, with gradient along all routes.
    """

    routed: Routed
    logps: Tensor
    stats: TokenStats


class HeadedMixin(OnlineMixin):
    """OnlineMixin with heads.

    Args:
        heads, fusion, budget, cold_start, kl_limit: see modules.DecoupledPO.

    Attributes:
        heads: the sub-policies and their fusion.
        dial: K shares of 1, the preference at evaluation; set it with `turn_dial`.
        fusion_entropy: weight of the bonus for even fusion weights, `fusion.entropy` among the schedulables.
        frozen: names of heads that do not step; a callback may change it.
        profile: adds up fusion weights by place in the completion; a callback may set it.
        only: the name of a head that all batches belong to until it is None again; a callback may change it.
    """

    heads: Heads
    fusion_entropy = Moved("fusion.entropy")

    def __init__(
        self,
        *,
        policy: PolicyConfig,
        rewards: dict[str, RewardSpec | str],
        heads: HeadsConfig,
        fusion: FusionConfig,
        budget: BudgetConfig | None,
        cold_start: ColdStartConfig,
        kl_limit: float | None,
        kl: KLConfig,
        **settings: Any,
    ) -> None:
        self.heads_config, self.fusion_config = as_config(HeadsConfig, heads), as_config(FusionConfig, fusion)
        self.budget = None if budget is None else as_config(BudgetConfig, budget)
        self.cold_start, self.kl_limit = as_config(ColdStartConfig, cold_start), kl_limit
        penalty = as_config(KLConfig, kl)
        # The heads' own KL needs the reference as well.
        super().__init__(
            policy=policy,
            rewards=rewards,
            kl=replace(penalty, measure=penalty.measure or self.heads_config.kl > 0),
            **settings,
        )
        self._check()
        self.weights = dict(zip(self.suite.names, self.suite.weights.tolist(), strict=True))
        self.dial = preference(self.weights, self.fusion_config.weights or {})
        self.head_steps = HeadSteps(self.heads_config.every, self.heads_config.between)
        self.fusion_entropy = self.fusion_config.entropy
        self.frozen: set[str] = set()
        self.profile: FusionProfile | None = None
        self.only: str | None = None
        self.kl_skips = 0
        self._own_kl = OwnKL(self.heads_config.kl_every) if self.heads_config.kl or penalty.measure else None
        self._tally = Tally()
        self._means: dict[str, Tensor] = {}

    def _check(self) -> None:
        """Raise UserError for settings that do not go together."""
        if taken := sorted({"trunk", "fusion"} & set(self.suite.names)):
            raise UserError(f"a reward is called {taken[0]}, which is a part of this policy; give it another name")
        if self.kl.in_reward:
            raise UserError("kl.place=reward cannot be: each head has its own reward; use kl.place=loss")
        if self.rollout_config.vllm is not None:
            raise UserError("rollout.vllm cannot be: the heads are in this process, and a vLLM server knows none")
        if self.kl_limit is not None and not (self.kl_limit > 0 and self.kl.needs_reference):
            raise UserError(
                f"kl_limit is {self.kl_limit}; it is above 0 and needs heads.kl, kl.coefficient or kl.measure"
            )
        if self.fusion_config.pool == "log_linear":
            return
        if self.sampling.score_temperature != 1.0:
            raise UserError("fusion.pool=linear is sampled at sampling.temperature 1; use log_linear for another")
        if self.kl.full or self.entropy.config.coefficient or self.entropy.controller is not None:
            raise UserError("fusion.pool=linear has no states for a KL over the vocabulary or an entropy bonus")

    # ------------------------------------------------------------------ building

    def build_parts(self) -> None:
        super().build_parts()
        spec = HeadsSpec.of(self.policy, self.weights, self.heads_config, self.fusion_config, self.budget)
        self.heads = Heads(spec, self.policy_config.init_seed).to(self.target_device)
        self.heads.attach(self.policy)
        if self.kl.needs_reference:
            self.reference = Headless(self.reference, self.heads)
        rank_zero_info(self._sizes())

    def _sizes(self) -> str:
        parts = {"trunk": self.policy, "heads": self.heads.subs, "fusion": self.heads.fusion}
        counts = {name: sum(p.numel() for p in part.parameters() if p.requires_grad) for name, part in parts.items()}
        total = sum(counts.values())
        told = ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in counts.items())
        spec = self.heads.spec
        return f"trained parameters: {told}; {len(spec.names)} heads of rank {spec.rank}, attention width {spec.width}"

    def lr_factors(self) -> Mapping[str, float]:
        return {f"heads.subs.{k}.": self.head_steps.rate for k in range(len(self.heads.subs))}

    def turn_dial(self, weights: Mapping[str, float]) -> None:
        """Evaluate under these weights of the rewards; those not named keep the ones they are trained with."""
        self.dial = preference(self.weights, weights)

    # ------------------------------------------------------------------ whose batch it is

    @property
    def solo(self) -> int | None:
        """The head that the current batch belongs to; None: to all."""
        if self.only is not None:
            return self.heads.spec.names.index(self.only)
        active = [k for k, weight in enumerate(self.heads.spec.weights) if weight > 0]
        alone = self.fusion_config.mode == "decode_only" or self.batches_seen < len(active) * self._cold_batches()
        return active[self.batches_seen % len(active)] if alone else None

    def _cold_batches(self) -> int:
        """Batches of the cold start for each head."""
        if not self.cold_start.epochs:
            return self.cold_start.rollouts
        batches = self.trainer.num_training_batches
        if not math.isfinite(batches):
            raise UserError("cold_start.epochs needs data of a known length; use cold_start.rollouts")
        return self.cold_start.rollouts + math.ceil(self.cold_start.epochs * batches)

    def train_batch(self, batch: GroupBatch) -> None:
        if self.solo is None:
            super().train_batch(batch)
            return
        with self.heads.preferring(self.heads.alone(self.solo)), held(self.policy, self.heads.fusion):
            super().train_batch(batch)

    def judge(self, batch: GroupBatch) -> list[dict[str, Any]]:
        with self.heads.preferring(self.dial):
            return super().judge(batch)

    # ------------------------------------------------------------------ what a rollout leaves behind

    def _measured(self, batch: GroupBatch, metrics: Metrics) -> GroupBatch:
        if self._own_kl is not None:
            prompts, seed = prompts_of(batch), derive(self.seed, "own kl")
            batch = self._own_kl.choose(batch, completion_keys(prompts, self.completions, seed, self.batches_seen))
        return super()._measured(batch, metrics)

    def measure(self, micro: GroupBatch) -> dict[str, Tensor]:
        """One pass of the reference gives its log-probs, and its states where heads have their own KL."""
        if self._own_kl is None:
            return super().measure(micro)
        states, head = self.reference.states(micro)
        scored = micro.scored.nonzero()[:, 0]
        tokens = (states[scored], head.weight, head.bias, micro.completion_ids[scored])
        logps, _ = score_tokens(*tokens, form=head.form, temperature=self.temperature)
        found = {REF_LOGPS: _spread(logps, scored, micro), PLACE: self._own_kl.keep(micro, states, head)}
        return found | self.measure_policy(micro) if self.measures_policy else found

    def measure_policy(self, micro: GroupBatch) -> dict[str, Tensor]:
        return self.old_stats(self.see(micro).stats)

    def own_advantages(self, parts: Decoupled) -> Tensor:
        """[N, K] A_k / std S, or A_k / std A_k where that is less. Opposed rewards cancel in S: divided by what is left
        of them, their advantages would leave every KL behind. A collective."""
        each = parts.each.double()
        squares = distributed.all_reduce_sum(torch.cat([(each**2).sum(0), each.new_full((1,), len(each))]))
        deviation = (squares[:-1] / (squares[-1] - 1).clamp(min=1)).sqrt()  # their means are 0
        return divided(each, torch.maximum(deviation, parts.deviation.double())).float()

    # ------------------------------------------------------------------ the policy along its routes

    def trunk_states(self, micro: GroupBatch) -> Tensor:
        """[C, H] states that predict each token, before any head."""
        with self.heads.detached():
            states = self.engine(micro, logps=False, hidden="before").hidden
        assert states is not None
        return states

    def see(self, micro: GroupBatch, states: Tensor | None = None) -> Seen:
        """The policy's tokens, from `trunk_states` if they are not given."""
        states = self.trunk_states(micro) if states is None else states
        scored = micro.scored.nonzero()[:, 0]
        head = lm_head_of(self.policy, self.heads.spec.pool)
        routed = route(self.heads, states[scored], head, micro.completion_ids[scored], temperature=self.temperature)
        logps = _spread(routed.logps, scored, micro)
        hidden = None
        if self.kl.in_loss and self.kl.full:
            assert routed.states is not None
            hidden = states.index_copy(0, scored, together(routed.states))
        stats = TokenStats(logps=together(logps), entropy=_spread(routed.entropy, scored, micro), hidden=hidden)
        return Seen(routed=routed, logps=logps, stats=stats)

    def held_back(self, micro: GroupBatch, seen: Seen, counts: Counts) -> tuple[Tensor, Metrics]:
        """(share of what holds every part back, metrics): the KL and the entropy bonus of the policy, the KL of each
        head's own policy, the bonus for even fusion weights."""
        total, metrics = self.penalties(micro, seen.stats, counts)
        names = [self.heads.spec.names[k] for k in self.heads.active]
        routed = seen.routed
        evenness = _spread(routed.evenness, micro.scored.nonzero()[:, 0], micro)
        if self.solo is None:
            total = total - self.fusion_entropy * self.reduce(evenness, micro, counts)
        metrics["fusion/entropy"] = mean_of(evenness, micro.scored)
        for k, name in enumerate(names):
            metrics[f"fusion/alpha/{name}"] = mean_of(routed.alpha[:, k])
            metrics[f"heads/dev/{name}"] = mean_of(routed.deviation[k])
        if self._own_kl is not None:
            head = lm_head_of(self.policy, self.heads.spec.pool)
            with torch.set_grad_enabled(self.heads_config.kl > 0):
                own, values = self._own_kl(micro, routed.own, head, self.temperature)
            total = total + self.heads_config.kl * own
            metrics |= {f"kl/{name}": kl_metric(v, torch.ones_like(v)) for name, v in zip(names, values, strict=True)}
        self.note(micro, seen)
        return total, metrics

    # ------------------------------------------------------------------ updates

    def begin_update(self, part: GroupBatch) -> None:
        """Before the loss of an update is computed. A collective."""
        self._tally = Tally()
        if self._own_kl is not None:
            self._own_kl.count(part)

    def note(self, micro: GroupBatch, seen: Seen) -> None:
        """What is known of an update beside its loss, for decisions that all ranks take together."""
        stats, routed = seen.stats, seen.routed
        assert stats.logps is not None
        k3 = stats.logps.new_zeros(())
        if self.kl_limit is not None:
            tokens = (stats.logps.detach(), micro.tokens[REF_LOGPS], micro.scored)
            k3 = token_kl(KL_ESTIMATORS.get("k3"), *tokens).sum()
        self._tally.add(len(routed.alpha), alpha=routed.alpha.sum(0), far=routed.deviation.sum(1), k3=k3)
        if self.profile is not None:
            self.profile.add(micro, self.heads.active, routed.alpha)

    def update_means(self) -> dict[str, Tensor]:
        """Means over the tokens of the update under way, over all ranks: `alpha`, `far`, `clipped` and `counted` (its
        denominator) [A], with a limit `k3` [1]. A collective."""
        count = len(self.heads.active)
        sizes = {"alpha": count, "far": count, "clipped": count, "counted": count, "k3": 1}
        return self._tally.means(sizes, self.device)

    def part_norms(self) -> dict[str, float]:
        """`trunk`, `fusion` and `head/NAME`, of what has a gradient."""
        self._means = self.update_means()
        norms = {name: total_norm(grads) for name, part in self._parts().items() if (grads := _gradients(part))}
        if not norms:
            return {}
        found = dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))
        self.note_values({f"grad_norm/{name}": value for name, value in found.items()})
        return found

    def _parts(self) -> dict[str, list[nn.Parameter]]:
        parts = {"trunk": list(self.policy.parameters()), "fusion": list(self.heads.fusion.parameters())}
        for name, sub in zip(self.heads.spec.names, self.heads.subs, strict=True):
            parts[f"head/{name}"] = list(sub.parameters())
        return parts

    def finish_gradients(self, parameters: Sequence[nn.Parameter], norm: Tensor) -> bool:
        """Heads step on what they gathered; each is clipped by itself, trunk and fusion together."""
        self._warn_of_far_heads(self._means["far"])
        if self._too_far(float(self._means["k3"])):
            return False
        parts = self._parts()
        heads = {name: part for name, part in parts.items() if name.startswith("head/")}
        if self.solo is None:
            self.head_steps.take({f"{n}.{i}": p for n, part in heads.items() for i, p in enumerate(part)})
        for name in self.frozen:
            for p in heads[f"head/{name}"]:
                p.grad = None
        if self.optim.clip_norm is not None:
            for part in (parts["trunk"] + parts["fusion"], *heads.values()):
                if grads := _gradients(part):
                    clip_gradients(part, self.optim.clip_norm, total_norm(grads))
        return True

    def _too_far(self, k3: float) -> bool:
        """Whether the policy has left its reference so far that the step is left out; told in the log."""
        if self.kl_limit is None or k3 <= self.kl_limit:
            return False
        self.kl_skips += 1
        if distributed.rank() == 0:
            log.warning("update %d skipped: KL %.3g nats a token, kl_limit %g", self.kl_skips, k3, self.kl_limit)
        return True

    def _warn_of_far_heads(self, far: Tensor) -> None:
        for k, distance in zip(self.heads.active, far.tolist(), strict=True):
            if distance > FAR:
                self.warn_once(
                    f"the head of reward {self.heads.spec.names[k]} is further from the trunk's states than they are "
                    "long: raise heads.kl, or lower optim.lr"
                )

    # ------------------------------------------------------------------ state

    def saved_heads(self) -> SavedHeads:
        """What an export writes beside the model."""
        return SavedHeads(spec=replace(self.heads.spec, weights=self.dial), tensors=self.heads.state_dict())

    def training_state(self) -> dict[str, Any]:
        heads = {
            "spec": plain(asdict(self.heads.spec)),
            "dial": list(self.dial),
            "steps": self.head_steps.state_dict(),
            "frozen": sorted(self.frozen),
            "only": self.only,
            "kl_skips": self.kl_skips,
            "profile": None if self.profile is None else self.profile.state_dict(self.device),
        }
        return {**super().training_state(), "heads": heads}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        super().load_training_state(state)
        heads = state["heads"]
        for name in ("names", "rank", "width", "scaled", "pool"):
            then, now = heads["spec"][name], plain(getattr(self.heads.spec, name))
            if then != now:
                raise UserError(f"the heads of the checkpoint have {name} {then}, those of this run {now}; keep it")
        self.head_steps.load_state_dict(heads["steps"])
        self.frozen, self.only, self.kl_skips = set(heads["frozen"]), heads["only"], heads["kl_skips"]
        if self.profile is not None and heads.get("profile") is not None:
            self.profile.load_state_dict(heads["profile"])
        if (self.frozen or self.only) and distributed.rank() == 0:
            held = f"heads are frozen ({', '.join(sorted(self.frozen))})" if self.frozen else f"only {self.only} learns"
            log.warning("as the checkpoint was made, %s; this stays so unless a callback ends it", held)


def _spread(values: Tensor, scored: Tensor, batch: GroupBatch) -> Tensor:
    """[..., scored] -> [..., C] fp32, 0 elsewhere."""
    out = values.new_zeros(*values.shape[:-1], len(batch.completion_ids), dtype=torch.float32)
    return out.index_copy(-1, scored, values.float())


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


@contextmanager
def held(*parts: nn.Module) -> Iterator[None]:
    """No gradient to any of their parameters in this block."""
    trained = [p for part in parts for p in part.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
