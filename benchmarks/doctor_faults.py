"""Runs made to show a fault: what the rules of `alignment.diagnosis_rules` must see in a run that has it.

Each trains the tiny model for some seconds, on completions, losses and gradients of its own. What is wrong is in the
settings, the rewards, the data or the processes, as it is in life, and never in the log. Tests make those that take one
process; `python -m benchmarks.doctor` makes all of them and writes the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from alignment import distributed
from alignment.batches import Group, GroupBatch
from alignment.diagnosis import Examination
from alignment.optim import OptimConfig
from alignment.rewards import RewardSpec
from alignment.rollout import SamplingConfig
from benchmarks import nonfinite
from benchmarks.doctor_rewards import (
    any_number,
    commonest,
    growing,
    liked,
    liked_here,
    longer_than_others,
    meant,
    ranked,
)
from callbacks import Doctor

EVERY = 5
"""Logged rows between two looks."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One run.

    Args:
        what: is wrong in it. make: the run in an empty folder, as the doctor has seen it.
        shows: rules that must give an alarm. alone: whether no other one may.
        names: a metric that the alarm of the first of them must give as evidence; "" for any.
        processes: how many it takes.
    """

    what: str
    make: Callable[[Path], Examination]
    shows: tuple[str, ...]
    alone: bool = False
    names: str = ""
    processes: int = 1

    def run(self, folder: Path) -> Examination:
        torch.manual_seed(0)
        return self.make(folder)

    def missed(self, seen: Examination) -> str:
        """What is not as it must be; "" for nothing."""
        fired = {alarm.rule for alarm in seen.alarms}
        named = {e.metric for alarm in seen.alarms if alarm.rule == self.shows[0] for e in alarm.evidence}
        lacking, more = sorted(set(self.shows) - fired), sorted(fired - set(self.shows)) if self.alone else []
        return "; ".join(
            filter(
                None,
                [
                    f"no alarm: {', '.join(lacking)}" if lacking else "",
                    f"alarms besides: {', '.join(more)}" if more else "",
                    f"{self.names} is no evidence" if self.names and self.names not in named else "",
                ],
            )
        )


# ---------------------------------------------------------------------- small runs


def texts(completions: int, count: int = 4) -> GroupBatch:
    """Prompts with so many completions each."""
    return GroupBatch.from_groups([replace(group, rows={}) for group in nonfinite.rows(completions, count)])


def prompts(**columns: Any) -> GroupBatch:
    """Four prompts with these columns."""
    return GroupBatch.from_groups(
        [replace(group, completions=(), rows={}, columns=columns) for group in nonfinite.rows(1, 4)]
    )


def steps(lr: float) -> OptimConfig:
    return OptimConfig(lr=lr, schedule="constant")


def paid(reward: Callable[..., Any], weight: float = 1.0) -> RewardSpec:
    return RewardSpec(reward=reward, in_process=True, weight=weight)


def module(algorithm: str, **settings: Any) -> Any:
    return nonfinite.build(algorithm, {"micro_batch_tokens": None, **settings})


def observed(
    module: Any, folder: Path, batches: Sequence[GroupBatch], *callbacks: L.Callback, held_out: GroupBatch | None = None
) -> Examination:
    """A run over these batches, with an evaluation on the batch `held_out` after every third, if there is one."""
    doctor, settings, loaders = Doctor(every=EVERY), {}, [_loader(batches)]
    if held_out is not None:
        settings = {"limit_val_batches": 1.0, "val_check_interval": 3}
        loaders.append(_loader([held_out]))
    nonfinite.trainer(folder, [doctor, *callbacks], **settings).fit(module, *loaders)
    return doctor.examination


def _loader(batches: Sequence[GroupBatch]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def online(algorithm: str, folder: Path, count: int, **settings: Any) -> Examination:
    """A run of so many batches of the same prompts."""
    return observed(module(algorithm, **settings), folder, [prompts()] * count)


# ---------------------------------------------------------------------- reward hacking

_LEARN = {"completions": 8, "optim": steps(3e-3)}


def hacked_held_out(folder: Path) -> Examination:
    return online("GRPO", folder, 40, rewards={"liked": paid(liked), "meant": paid(meant, 0.0)}, **_LEARN)


def hacked_validation(folder: Path) -> Examination:
    rollout = {"eval_temperature": 1.0, "eval_completions": 8}
    grpo = module("GRPO", rewards={"liked": paid(liked_here)}, rollout=rollout, **_LEARN)
    return observed(grpo, folder, [prompts(here=True)] * 42, held_out=prompts(here=False))


def hacked_length(folder: Path) -> Examination:
    sampling = SamplingConfig(max_tokens=12, stop_ids=list(range(4, 110)))
    return online("GRPO", folder, 40, rewards={"judge": paid(longer_than_others)}, sampling=sampling, **_LEARN)


def hacked_repetition(folder: Path) -> Examination:
    sampling = SamplingConfig(max_tokens=16, stop_ids=[2])
    settings = {**_LEARN, "optim": steps(0.01), "sampling": sampling}
    return online("GRPO", folder, 40, rewards={"commonest": paid(commonest)}, **settings)


# ---------------------------------------------------------------------- the policy


def collapsed(folder: Path) -> Examination:
    return online("GRPO", folder, 40, rewards={"judge": paid(ranked)}, completions=8, optim=steps(0.03))


def run_away(folder: Path) -> Examination:
    return online("GRPO", folder, 30, rewards={"any": paid(any_number)}, optim=steps(0.03), kl={"measure": True})


def held_back(folder: Path) -> Examination:
    return online("GRPO", folder, 35, rewards={"liked": paid(liked)}, optim=steps(1e-12), kl={"measure": True})


def held_back_pairs(folder: Path) -> Examination:
    return observed(module("DPO", optim=steps(1e-12)), folder, [texts(2)] * 35)


def too_many_updates(folder: Path) -> Examination:
    settings = {"optim": steps(0.05), "epochs": 4, "value_coefficient": 10.0, "value_clip": None}
    return online("PPO", folder, 30, rewards={"liked": paid(liked)}, **settings)


def outrun_critic(folder: Path) -> Examination:
    return online("PPO", folder, 30, rewards={"grows": paid(growing())}, epochs=4)


def displaced(folder: Path) -> Examination:
    """Pairs whose better half is `a a a a a a` and whose worse half says `a` three times more: what tells them apart
    is how likely another `a` is, in either of them."""
    groups = [
        Group(prompt=[1, 10 + i], completions=[[100 + 7 * i] * 6, [100 + 7 * i] * 9], index=i, columns={})
        for i in range(4)
    ]
    return observed(module("DPO", optim=steps(1e-3)), folder, [GroupBatch.from_groups(groups)] * 30)


# ---------------------------------------------------------------------- rewards and completions


def constant(folder: Path) -> Examination:
    return online("GRPO", folder, 12, rewards={"same": paid(lambda completion: 0.5)})


def drowned(folder: Path) -> Examination:
    return online("GRPO", folder, 40, rewards={"liked": paid(liked), "judge": paid(ranked, 0.2)}, **_LEARN)


def lengthening(folder: Path) -> Examination:
    settings = {"advantage": "benchmarks.doctor_rewards.longer", "completions": 8, "optim": steps(0.01)}
    return online("GRPO", folder, 40, rewards={"any": paid(any_number)}, **settings)


def endless(folder: Path) -> Examination:
    sampling = SamplingConfig(max_tokens=6, stop_ids=[2])
    return online("GRPO", folder, 12, rewards={"liked": paid(liked)}, sampling=sampling)


# ---------------------------------------------------------------------- batches and processes


class Jolt(L.Callback):
    """One batch meets weights that are far off."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._scale(module, 1000.0, batch_idx)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._scale(module, 1 / 1000.0, batch_idx)

    def _scale(self, module: Any, factor: float, batch_idx: int) -> None:
        if batch_idx == self.at:
            with torch.no_grad():
                module.policy.get_output_embeddings().weight.mul_(factor)


def jolted(folder: Path) -> Examination:
    return observed(module("SFT", optim=steps(1e-4)), folder, [texts(1)] * 30, Jolt(26))


class Slow(list[GroupBatch]):
    """Every batch is long in coming."""

    def __getitem__(self, i: Any) -> Any:
        time.sleep(0.15)
        return super().__getitem__(i)


def waiting(folder: Path) -> Examination:
    return observed(module("SFT", optim=steps(1e-4)), folder, Slow([texts(1)] * 14))


class Drift(L.Callback):
    """The last rank's weights leave those of the others before the batch `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if module.batches_seen == self.at and distributed.rank() == distributed.world_size() - 1:
            with torch.no_grad():
                next(module.policy.parameters()).view(-1)[0] += 1e-6


def parted(folder: Path) -> Examination:
    if failed := nonfinite.of_two(_rank, folder):
        raise RuntimeError(failed)
    seen = Examination()
    seen.load_state_dict(json.loads((folder / "examination.json").read_text(encoding="utf-8")))
    return seen


def _rank(rank: int, folder: Path) -> None:
    doctor = Doctor(every=1)
    loop = nonfinite.trainer(folder, [doctor, Drift(2)], devices=2, strategy="ddp")
    own = texts(2).select_groups([rank, rank + 2])
    loop.fit(module("DPO"), _loader([own] * 6))
    if rank == 0:
        (folder / "examination.json").write_text(json.dumps(doctor.examination.state_dict()), encoding="utf-8")


# ---------------------------------------------------------------------- all of them

FAULTS: dict[str, Fault] = {
    "hacked_held_out": Fault(
        what="GRPO pays for one thing, and a reward of weight 0 for what it is bought with",
        make=hacked_held_out,
        shows=("reward_hacking",),
        names="rewards/meant/mean",
    ),
    "hacked_validation": Fault(
        what="GRPO pays for one thing in training, and validation for the other",
        make=hacked_validation,
        shows=("reward_hacking",),
        names="val/reward",
    ),
    "hacked_length": Fault(
        what="a judge likes the longer ones of the answers it compares, and longer answers as such hardly",
        make=hacked_length,
        shows=("reward_hacking",),
        names="reward (length-controlled)",
    ),
    "hacked_repetition": Fault(
        what="GRPO pays for each time that the commonest token comes",
        make=hacked_repetition,
        shows=("reward_hacking", "repetition"),
        names="completions/repetition",
    ),
    "collapsed": Fault(
        what="a judge always has half of the answers win, at a learning rate of 0.03",
        make=collapsed,
        shows=("entropy_collapse",),
    ),
    "run_away": Fault(
        what="GRPO on a number that says nothing, at a learning rate of 0.03, without a KL",
        make=run_away,
        shows=("kl_runaway",),
    ),
    "held_back": Fault(
        what="GRPO at a learning rate of 1e-12", make=held_back, shows=("over_conservative",), alone=True
    ),
    "held_back_pairs": Fault(
        what="DPO at a learning rate of 1e-12", make=held_back_pairs, shows=("over_conservative_pairs",), alone=True
    ),
    "too_many_updates": Fault(
        what="PPO with four passes over a rollout at a learning rate of 0.05",
        make=too_many_updates,
        shows=("clip_saturation",),
    ),
    "outrun_critic": Fault(
        what="PPO on a reward whose size grows with every completion", make=outrun_critic, shows=("critic_divergence",)
    ),
    "displaced": Fault(
        what="DPO on pairs whose worse half is the better one said on",
        make=displaced,
        shows=("chosen_logp_falls",),
    ),
    "constant": Fault(
        what="a reward of 0.5 for everything",
        make=constant,
        shows=("constant_reward", "dead_groups"),
        alone=True,
    ),
    "drowned": Fault(
        what="beside a reward that is learned, a judge that always has half of the answers win",
        make=drowned,
        shows=("reward_never_moves",),
    ),
    "lengthening": Fault(
        what="an advantage that looks at nothing but length", make=lengthening, shows=("length_drift",)
    ),
    "endless": Fault(what="a policy that has not learned to end, and six tokens", make=endless, shows=("truncation",)),
    "jolted": Fault(
        what="SFT, and one batch meets an LM head a thousand times too large",
        make=jolted,
        shows=("loss_spike",),
        alone=True,
    ),
    "waiting": Fault(what="SFT on batches that take 0.15 s to make", make=waiting, shows=("data_bound",), alone=True),
    "parted": Fault(
        what="two processes, of which one adds 1e-6 to one weight before the third batch",
        make=parted,
        shows=("ranks_disagree",),
        alone=True,
        processes=2,
    ),
}
"""Name -> run."""
