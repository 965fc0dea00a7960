"""R7: NaN or infinity put into one place of a small run, for one batch; no parameter may be damaged, and the place is
named.

A run has five batches. Before the second one something is put into a place, after it is taken away again. What must
hold: weights and moments are those from before that batch, one update is counted as not finite, later batches train,
everything is finite at the end, and callbacks.NanGuard says which place it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import modules
from alignment.batches import Group, GroupBatch
from alignment.guard import TrainingDivergedError
from alignment.logprobs import TokenStats
from alignment.optim import OptimConfig
from alignment.policy import LoRAConfig, PolicyConfig
from alignment.randomness import generator
from alignment.rewards import RewardSpec
from alignment.rollout import SAMPLER_LOGPS, SamplingConfig
from benchmarks.ports import meeting_port
from callbacks import NanGuard

NAN, INF = math.nan, math.inf
BAD = 1
"""Number of the batch that meets it."""
COUNT, SIZE = 5, 4
"""Batches of a run, prompts of a batch."""

PAIRED = ("RewardModel", "DPO", "GeneralizedRPO", "SimPO", "ORPO", "CPO", "KTO")
OFFLINE = ("SFT", *PAIRED)
ONLINE = ("GRPO", "GDPO", "PPO", "MORL", "DecoupledPO", "OnlineDPO")
ALL = OFFLINE + ONLINE

Undo = Callable[[], None]
Put = Callable[[Any, GroupBatch], Undo]
"""put(module, the batch that comes) -> what takes it away again."""

armed: set[str] = set()
"""Faults of rewards and estimators that are due now."""


# ---------------------------------------------------------------------- small runs


def odd(completion_ids: list[list[int]], completions: list[str]) -> list[float]:
    """Share of odd ids; with a fault armed the first completion gets that."""
    found = [sum(i % 2 for i in ids) / max(1, len(ids)) for ids in completion_ids]
    if "nan" in armed:
        found[0] = NAN
    if "zero" in armed:
        found[0] /= len(armed) - 1
    return found


def length(completion_ids: list[list[int]], completions: list[str]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def overflowing(d: Tensor, ratio: Tensor) -> Tensor:
    """k1, and an exponential that overflows when that is armed."""
    return torch.exp(1000 * (1 - d)) if "kl" in armed else -d


def rows(completions: int, count: int = COUNT * SIZE) -> list[Group]:
    draw = generator(0, "r7", completions)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(4, 500, (size,), generator=draw).tolist()

    good_first = [1.0, 0.0][:completions]
    return [
        Group(
            prompt=ids(2, 6),
            completions=[ids(3, 9) for _ in range(completions)],
            rows={"margin": [0.1] * completions, "label": good_first},
            columns={"source": f"line {i}"},
            index=100 + i,
        )
        for i in range(count)
    ]


def batches(algorithm: str) -> list[GroupBatch]:
    groups = rows(1 if algorithm == "SFT" else 2)
    if algorithm in ONLINE:
        groups = [replace(group, completions=(), rows={}) for group in groups]
    return [GroupBatch.from_groups(groups[i : i + SIZE]) for i in range(0, len(groups), SIZE)]


def build(algorithm: str, settings: Mapping[str, Any]) -> Any:
    """The module; `settings` come in place of small ones."""
    small: dict[str, Any] = {
        "policy": PolicyConfig(name="tiny"),
        "optim": OptimConfig(lr=1e-3, schedule="constant"),
        "micro_batch_tokens": 48,
    }
    if algorithm in ONLINE:
        both = {"odd": RewardSpec(reward=odd, in_process=True), "length": RewardSpec(reward=length, in_process=True)}
        # Each token ends a completion with a probability of about a fifth.
        sampling = SamplingConfig(max_tokens=6, stop_ids=list(range(4, 110)))
        small |= {"rewards": both, "completions": 4, "sampling": sampling}
    if algorithm == "PPO":
        small |= {"epochs": 1}
    return getattr(modules, algorithm)(**{**small, **settings})


def trainer(folder: Path, callbacks: Sequence[L.Callback], **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1, **quiet, **settings}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), use_distributed_sampler=False, **settings)


# ---------------------------------------------------------------------- putting it there


def setting(tensor: Tensor, index: Any, value: float) -> Undo:
    """Write into a tensor, as code outside of an optimizer does."""
    with torch.no_grad():
        before = tensor[index].clone()
        tensor[index] = value

    def undo() -> None:
        with torch.no_grad():
            tensor[index] = before

    return undo


def parameter(module: nn.Module, ends: str) -> nn.Parameter:
    return next(p for name, p in module.named_parameters() if name.endswith(ends))


def part(module: nn.Module, ends: str) -> nn.Module:
    return next(m for name, m in module.named_modules() if name.endswith(ends))


def weight(module: Any, batch: GroupBatch) -> Undo:
    return setting(parameter(module, "0.mlp.up_proj.weight"), (3, 5), NAN)


def embeddings_row(module: Any, batch: GroupBatch) -> Undo:
    return setting(parameter(module, "embed_tokens.weight"), int(batch.prompt_ids[0]), INF)


def adapter(module: Any, batch: GroupBatch) -> Undo:
    return setting(parameter(module, "lora_A.default.weight"), (0, 0), NAN)


def buffer(module: Any, batch: GroupBatch) -> Undo:
    return setting(dict(module.named_buffers())[next(n for n, _ in module.named_buffers() if "inv_freq" in n)], 0, NAN)


def norm_buffer(module: Any, batch: GroupBatch) -> Undo:
    norm = part(module, "0.post_attention_layernorm")
    norm.register_buffer("shift", torch.tensor(INF), persistent=False)
    handle = norm.register_forward_hook(lambda m, _, output: output + m.shift)

    def undo() -> None:
        handle.remove()
        del norm.shift

    return undo


def layer(module: Any, batch: GroupBatch) -> Undo:
    return part(module, "1.self_attn.o_proj").register_forward_hook(lambda _m, _a, output: output * INF).remove


def logits(module: Any, batch: GroupBatch) -> Undo:
    """The states below the LM head, which is tied to the embeddings and no module of its own here."""
    norms = [m for name, m in module.named_modules() if name.startswith("policy") and name.endswith("model.norm")]
    return norms[0].register_forward_hook(lambda _m, _a, output: output * NAN).remove


class Engine:
    """Another engine, whose log-prob of the first scored token is NaN."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, batch: GroupBatch, **asked: Any) -> TokenStats:
        stats = self._inner(batch, **asked)
        if stats.logps is None:
            return stats
        first = torch.zeros_like(batch.scored)
        first[int(batch.scored.nonzero()[0])] = True
        return replace(stats, logps=torch.where(first, NAN, 1.0) * stats.logps)


def log_probs(module: Any, batch: GroupBatch) -> Undo:
    before, module.engine = module.engine, Engine(module.engine)

    def undo() -> None:
        module.engine = before

    return undo


def _loss(module: Any, bad: Callable[[GroupBatch], bool]) -> Undo:
    loss = module.loss

    def spoilt(micro: GroupBatch, counts: Any, *more: Any) -> Any:
        share, metrics = loss(micro, counts, *more)
        return (share * NAN if bad(micro) else share), metrics

    module.loss = spoilt

    def undo() -> None:
        del module.loss

    return undo


def whole_loss(module: Any, batch: GroupBatch) -> Undo:
    return _loss(module, lambda micro: True)


def last_micro_batch(module: Any, batch: GroupBatch) -> Undo:
    """Micro-batches hold rows from the longest to the shortest."""
    last = int(batch.group_index[_last(batch)])
    return _loss(module, lambda micro: last in micro.group_index.tolist())


def one_gradient(module: Any, batch: GroupBatch) -> Undo:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = INF
        return gradient

    return parameter(module, "0.mlp.up_proj.weight").register_hook(spoil).remove


def arm(*kinds: str) -> Put:
    def put(module: Any, batch: GroupBatch) -> Undo:
        armed.update(kinds)
        return armed.clear

    return put


def advantage(module: Any, batch: GroupBatch) -> Undo:
    """What an estimator of a user's does that divides by the deviation of a group whose rewards are alike."""
    credit = module.credit

    def spoilt(experience: GroupBatch, table: Any) -> GroupBatch:
        found = credit(experience, table)
        first = torch.arange(found.num_completions) == 0
        return found.with_rows(advantage=torch.where(first, NAN, found.rows["advantage"]))

    module.credit = spoilt

    def undo() -> None:
        del module.credit

    return undo


def reference(module: Any, batch: GroupBatch) -> Undo:
    """A weight of the reference, which is a second model."""
    inner = getattr(module.reference, "_inner", module.reference)
    return setting(parameter(inner._model, "1.mlp.down_proj.weight"), (0, 0), NAN)


def value(module: Any, batch: GroupBatch) -> Undo:
    return part(module, "critic.head").register_forward_hook(lambda _m, _a, output: output * NAN).remove


def optimizer_state(module: Any, batch: GroupBatch) -> Undo:
    state = module.trainer.optimizers[0].state[parameter(module, "0.mlp.up_proj.weight")]
    return setting(state["exp_avg"], (0, 0), NAN)


def learning_rate(module: Any, batch: GroupBatch) -> Undo:
    group = module.trainer.optimizers[0].param_groups[-1]
    before, group["lr"] = group["lr"], NAN

    def undo() -> None:
        group["lr"] = before

    return undo


def scheduled(name: str) -> Put:
    def put(module: Any, batch: GroupBatch) -> Undo:
        moved = module.schedulables[name]
        before = moved.value
        moved.write(NAN)
        return lambda: moved.write(before)

    return put


def margin(module: Any, batch: GroupBatch) -> Undo:
    return setting(batch.rows["margin"], slice(2, 4), NAN)


def row_weight(module: Any, batch: GroupBatch) -> Undo:
    return setting(batch.weights, 0, NAN)


def sampler(module: Any, batch: GroupBatch) -> Undo:
    inner = module.rollout.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        setting(found.batch.tokens[SAMPLER_LOGPS], 1, NAN)
        return found

    module.rollout.generate = generate

    def undo() -> None:
        del module.rollout.generate

    return undo


# ---------------------------------------------------------------------- the places


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of the places.

    Args:
        put: see Put. blamed: what the guard must call it; "" where the update is made all the same.
        says: what its line must hold.
        algorithms: where there is such a place. quick: those of the quick tests.
        settings: of the module. row: the row of the data that it must name; None for none.
    """

    put: Put
    blamed: str
    says: str
    algorithms: tuple[str, ...] = ALL
    quick: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    row: int | None = None


LORA = {"policy": PolicyConfig(name="tiny", lora=LoRAConfig(r=4))}
KL = {"kl": {"coefficient": 0.1}}
COPY = {"reference": "copy"}
CHARGED = {"kl": {"coefficient": 0.1, "estimator": "benchmarks.nonfinite.overflowing", "place": "reward"}}
TEXTS = tuple(name for name in OFFLINE if name not in ("RewardModel",))
FIRST = 100 + BAD * SIZE
"""Number of the first row of the bad batch."""

PLACES: dict[str, Place] = {
    "weight": Place(put=weight, blamed="weight", says="mlp.up_proj.weight is nan at [3, 5]", quick=("SFT", "PPO")),
    "embeddings row": Place(put=embeddings_row, blamed="weight", says="embed_tokens.weight is inf", quick=("DPO",)),
    "adapter": Place(
        put=adapter, blamed="weight", says="lora_A.default.weight is nan at [0, 0]", quick=("GRPO",), settings=LORA
    ),
    "buffer": Place(put=buffer, blamed="buffer", says="inv_freq is nan", quick=("SFT",)),
    "buffer of a norm layer": Place(put=norm_buffer, blamed="buffer", says="layernorm.shift is inf", quick=("DPO",)),
    "layer": Place(put=layer, blamed="layer", says="1.self_attn.o_proj", quick=("DecoupledPO", "DPO")),
    "logits": Place(put=logits, blamed="layer", says="model.norm", algorithms=TEXTS + ONLINE, quick=("PPO",)),
    "log-probs": Place(put=log_probs, blamed="log-prob", says="1 of", algorithms=TEXTS, quick=("SFT",)),
    "loss": Place(
        put=whole_loss,
        blamed="loss term",
        says="the loss (nan)",
        algorithms=(*OFFLINE, "GRPO", "PPO", "DecoupledPO"),
        quick=("GRPO",),
    ),
    "last micro-batch": Place(
        put=last_micro_batch,
        blamed="loss term",
        says="the loss (nan)",
        algorithms=("SFT", "RewardModel", "DPO", "ORPO"),
        quick=("DPO",),
        settings={"micro_batch_tokens": 16},
        row=-1,
    ),
    "one gradient": Place(
        put=one_gradient, blamed="gradient", says="0.mlp.up_proj.weight", quick=("SFT", "DecoupledPO")
    ),
    "reward": Place(put=arm("nan"), blamed="", says="reward odd gave NaN", algorithms=ONLINE, quick=("GRPO",)),
    "reward that divides by zero": Place(
        put=arm("zero"), blamed="", says="reward odd ZeroDivisionError", algorithms=ONLINE, quick=("DecoupledPO",)
    ),
    "advantage": Place(
        put=advantage,
        blamed="advantage",
        says="advantage is nan in 1 of 16",
        algorithms=ONLINE,
        quick=("PPO", "GRPO"),
        row=FIRST,
    ),
    "reference": Place(
        put=reference,
        blamed="reference",
        says="log-prob under the reference",
        algorithms=("DPO", "GeneralizedRPO"),
        quick=("DPO",),
        settings=COPY,
    ),
    "reference of a rollout": Place(
        put=reference,
        blamed="reference",
        says="ref_logps is nan",
        algorithms=("GRPO", "GDPO", "PPO", "MORL", "DecoupledPO"),
        quick=("PPO", "DecoupledPO"),
        settings=KL,
    ),
    "value": Place(put=value, blamed="value", says="values is nan", algorithms=("PPO",), quick=("PPO",)),
    "KL estimate": Place(
        put=arm("kl"),
        blamed="kl",
        says="divergence from the reference is inf",
        algorithms=("GRPO", "GDPO", "PPO"),
        quick=("GRPO", "PPO"),
        settings=CHARGED,
    ),
    "optimizer state": Place(
        put=optimizer_state, blamed="optimizer state", says="0.mlp.up_proj.weight is not finite", quick=("SFT", "GRPO")
    ),
    "learning rate": Place(put=learning_rate, blamed="learning rate", says="learning rate is nan", quick=("DPO",)),
    "scheduled beta": Place(
        put=scheduled("beta"),
        blamed="setting",
        says="beta is nan",
        algorithms=("DPO", "GeneralizedRPO", "SimPO", "ORPO", "CPO", "KTO", "OnlineDPO"),
        quick=("DPO",),
    ),
    "scheduled KL": Place(
        put=scheduled("kl.coefficient"),
        blamed="setting",
        says="kl.coefficient is nan",
        algorithms=("GRPO", "GDPO", "MORL", "DecoupledPO"),
        quick=("GRPO",),
        settings=KL,
    ),
    "dataset margin": Place(
        put=margin,
        blamed="data",
        says="margin is nan in 2 of",
        algorithms=("RewardModel",),
        quick=("RewardModel",),
        row=FIRST + 1,
    ),
    "row weight": Place(
        put=row_weight,
        blamed="data",
        says="weights is nan in 1 of",
        algorithms=("SFT", "RewardModel", "DPO", "KTO"),
        quick=("SFT",),
        row=FIRST,
    ),
    "sampler log-probs": Place(
        put=sampler,
        blamed="sampler",
        says="sampler_logps is nan at 1 of",
        algorithms=ONLINE,
        quick=("GRPO",),
        row=FIRST,
    ),
}


# ---------------------------------------------------------------------- a try


class Spoil(L.Callback):
    """Puts something into a place for one batch, and looks at what that did."""

    def __init__(self, place: Place, rank: int | None = None) -> None:
        self.place, self.rank = place, rank  # None: on every rank
        self.batches: list[GroupBatch] = []
        self.kept = ""  # what the bad batch changed all the same
        self.moved: list[bool] = []
        self._undo: Undo | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: GroupBatch, batch_idx: int) -> None:
        self._before = snapshot(trainer, module)
        if batch_idx == BAD and self.rank in (None, trainer.global_rank):
            self.batches.append(batch)
            self._undo = self.place.put(module, batch)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        if len(self.moved) == BAD and self.place.blamed:
            self.kept = different(self._before, snapshot(trainer, module))
        self.moved.append(bool(different(self._before, snapshot(trainer, module))))


def snapshot(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Trained weights and what the optimizer remembers of each."""
    out = {f"weight {name}": p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    for i, state in enumerate(trainer.optimizers[0].state.values()):
        out |= {f"{key} {i}": value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    return out


def different(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """Names of what is not bit for bit the same."""
    names = sorted(before.keys() ^ after.keys())
    return ", ".join([*names, *(n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n]))])


class Lines(logging.Handler):
    """Events that a run records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(place: Place, algorithm: str, folder: Path) -> str:
    """One try. "" when all held, else what did not."""
    try:
        module, spoil, lines = fitted(place, algorithm, folder)
    except TrainingDivergedError as error:
        return str(error)
    return "; ".join(filter(None, [*_harm(place, module, spoil), *_told(place, spoil, lines, folder)]))


def fitted(
    place: Place, algorithm: str, folder: Path, rank: int | None = None, **settings: Any
) -> tuple[Any, Spoil, list[str]]:
    """A module that has met the place, on one rank or on all; what was seen of it, and the events."""
    torch.manual_seed(1)
    spoil, heard = Spoil(place, rank), Lines()
    module = build(algorithm, place.settings)
    job = trainer(folder, [spoil, NanGuard()], **settings)
    own = [batch.select_groups(list(range(distributed_rank(), SIZE, job.world_size))) for batch in batches(algorithm)]
    logger = logging.getLogger("alignment.events")
    logger.addHandler(heard)
    try:
        job.fit(module, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
    finally:
        logger.removeHandler(heard)
        armed.clear()
    return module, spoil, heard.lines


def distributed_rank() -> int:
    """Before there is a process group, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _harm(place: Place, module: Any, spoil: Spoil) -> list[str]:
    bad = [name for name, value in snapshot(module.trainer, module).items() if not bool(torch.isfinite(value).all())]
    expected = 1 if place.blamed else 0
    return [
        f"not finite at the end: {', '.join(bad[:3])}" if bad else "",
        f"changed by the bad batch: {spoil.kept[:200]}" if spoil.kept else "",
        "" if module.nonfinite_steps == expected else f"{module.nonfinite_steps} updates counted, not {expected}",
        "" if any(spoil.moved[BAD + 1 :]) and spoil.moved[0] else f"does not train: {spoil.moved}",
    ]


def _told(place: Place, spoil: Spoil, lines: Sequence[str], folder: Path) -> list[str]:
    said = [line for line in lines if place.says in line]
    out = ["" if len(said) == 1 else f"said {list(lines)}, not once '{place.says}'"]
    if not place.blamed:
        return out
    facts = json.loads((folder / "nonfinite" / f"batch-{BAD}" / "rank0.json").read_text())["facts"]["blame"]
    if facts["place"] != place.blamed:
        out.append(f"blamed {facts['place']} ({facts['chain']}), not {place.blamed}")
    if place.row is not None:
        shortest = int(spoil.batches[0].group_index[_last(spoil.batches[0])])
        wanted = place.row if place.row >= 0 else shortest
        found = [(row["row"], row["columns"].get("source")) for row in facts["rows"]]
        if {row for row, _ in found} != {wanted} or found[0][1] != f"line {wanted - 100}":
            out.append(f"rows {found}, not {wanted}")
    return out


def _last(batch: GroupBatch) -> int:
    """The group that `GroupBatch.split` takes last: the shortest one, of several the last."""
    sizes = batch.group_tokens().tolist()
    return max(range(len(sizes)), key=lambda g: (-sizes[g], g))


# ---------------------------------------------------------------------- one rank of two


def of_two(target: Callable[..., None], folder: Path, *given: Any, timeout: float = 300) -> str:
    """`target(rank, folder, *given)` in two processes that can meet. What failed, "" for nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.nonfinite"])
    port = meeting_port()
    ranks = [context.Process(target=_member, args=(target, r, port, folder, given), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout)
        if [process.exitcode for process in ranks] != [0, 0]:
            outputs = [(folder / f"output{r}.txt").read_text()[-2000:] for r in range(2)]
            return f"exit codes {[process.exitcode for process in ranks]}: {outputs}"
    finally:
        for process in ranks:
            process.kill()
    return ""


def _member(target: Callable[..., None], rank: int, port: int, folder: Path, given: Sequence[Any]) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in meeting.items()})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    output = os.open(folder / f"output{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    target(rank, folder, *given)


def one_rank(tries: Sequence[tuple[str, str]], folder: Path, timeout: float = 300) -> list[str]:
    """Tries (place, algorithm) on two processes, of which only the second meets the place. What did not hold."""
    if failed := of_two(_tries, folder, list(tries), timeout=timeout):
        return [failed]
    first, second = (json.loads((folder / f"rank{r}.json").read_text()) for r in range(2))
    failures = []
    for name, algorithm in tries:
        failed = _disagreement(PLACES[name], first[f"{name} {algorithm}"], second[f"{name} {algorithm}"])
        failures += [f"{name} on one rank, {algorithm}: {failed}"] if failed else []
    return failures


def _tries(rank: int, folder: Path, tries: Sequence[tuple[str, str]]) -> None:
    found = {}
    for i, (name, algorithm) in enumerate(tries):
        place, own = PLACES[name], folder / str(i)
        module, spoil, lines = fitted(place, algorithm, own, rank=1, devices=2, strategy="ddp")
        harm = "; ".join(filter(None, _harm(place, module, spoil)))
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        facts: dict[str, Any] = {}
        if place.blamed:
            text = (own / "nonfinite" / f"batch-{BAD}" / f"rank{rank}.json").read_text()
            facts = json.loads(text)["facts"]["blame"]
        found[f"{name} {algorithm}"] = {"harm": harm, "weights": digest, "lines": lines, "facts": facts}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def _disagreement(place: Place, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    if first["harm"] or second["harm"]:
        return f"{first['harm']} | {second['harm']}"
    if first["weights"] != second["weights"]:
        return "ranks hold other weights"
    said = [line for line in first["lines"] if place.says in line and "on rank 1" in line]
    if len(said) != 1 or second["lines"]:
        return f"rank 0 said {first['lines']}, rank 1 {second['lines']}"
    facts = first["facts"]
    if facts != second["facts"] or (facts and (facts["place"], facts["ranks"]) != (place.blamed, [1])):
        return f"blamed {facts} | {second['facts']}"
    return ""
