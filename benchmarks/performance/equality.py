"""`python -m benchmarks.performance.equality`: our losses, gradients and token log-probs beside TRL's, in fp32.

Both sides start from the same small random Llama and see the same rows in the same order; online ones are given their
completions. Each method trains for some steps on both sides. Compared are the token log-probs of the first step, its
loss, its gradient before clipping, and the losses of all steps. PPO is TRL 1.12.0's, on completions that the length
limit ends, whose score is on the last token on either side. Prints and writes JSON rows {what, ours, theirs,
difference, bound, ok}.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from alignment.batches import Group, GroupBatch
from alignment.critic import CriticConfig
from alignment.gae import whiten
from alignment.optim import OptimConfig
from alignment.penalties import KLConfig
from alignment.policy import PolicyConfig
from alignment.rewards import RewardSpec
from alignment.rollout import Rollout, SamplingConfig, assemble
from benchmarks.performance import peers, token_rewards
from benchmarks.performance.turns import Worker
from modules import DPO, GDPO, GRPO, PPO, SFT, RewardModel

WORKER = Path(__file__).with_name("trl_worker.py")
STEPS, ROWS, GROUP = 50, 4, 4
LENGTH = 10
"""Most tokens of a completion."""
PAD, END, WORDS = 0, 2, range(4, 200)
LR = 1e-3
LOGP, COSINE, GRADIENT, CURVE = 1e-5, 1e-6, 1e-5, 1e-4
"""Bounds: of log-probs in nats, of one minus the cosine, of the gradient's norm (relative), of losses."""
PPO_EPOCHS = 4


@dataclass
class Side:
    """What a side did: log-probs of each row (its ids -> values), gradients by name, the loss of every step."""

    logps: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- models and rows


def save_models(folder: Path) -> None:
    """`policy` and `scorer`: a small Llama with its tokenizer of one token for each word, and a classifier."""
    names = ["<pad>", "<bos>", "</s>", "<unk>", *(f"w{i}" for i in WORDS)]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:4]])
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **marks)  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "scorer")  # type: ignore[no-untyped-call]
    for name in ("policy", "scorer"):
        tokenizer.save_pretrained(folder / name)


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def rows_of(completions: int, steps: int, *, ends: bool = True, fixed: bool = False) -> list[Group]:
    """Groups for all steps. ends: completions end with the end token. fixed: all have LENGTH tokens."""
    draw = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [draw.choice(WORDS) for _ in range(draw.randint(low, high))]

    return [
        Group(
            prompt=ids(3, 16),
            completions=[
                ids(LENGTH if fixed else 1, LENGTH - int(ends)) + [END] * int(ends) for _ in range(completions)
            ],
            columns={"flat": i % 4 == 3},
            index=i,
        )
        for i in range(ROWS * steps)
    ]


def json_row(kind: str, group: Group) -> dict[str, Any]:
    """A group as a line of the peer's data: without end tokens, which its trainers append."""
    texts = [words([i for i in ids if i != END]) for ids in group.completions]
    row: dict[str, Any] = {"prompt": words(group.prompt)}
    if kind == "sft":
        return {**row, "completion": texts[0]}
    if kind == "kto":
        return {**row, "completion": texts[0], "label": bool(group.rows["label"][0])}
    if kind in ("dpo", "rm", "cpo", "orpo"):
        return {**row, "chosen": texts[0], "rejected": texts[1]}
    return {**row, "flat": group.columns["flat"]}


# ---------------------------------------------------------------------------------------------- theirs


def theirs(
    spec: dict[str, Any], groups: Sequence[Group], interpreter: Path, folder: Path, worker: Path = WORKER
) -> Side:
    """Train the peer."""
    work = folder / spec["id"]
    work.mkdir()
    paths = {name: work / name for name in ("data", "replay", "dump", "spec", "log")}
    paths["data"].write_text("".join(json.dumps(json_row(spec["kind"], g)) + "\n" for g in groups), encoding="utf-8")
    replay = "".join(json.dumps({"completions": list(g.completions)}) + "\n" for g in groups)
    paths["replay"].write_text(replay, encoding="utf-8")
    online = spec["kind"] in ("grpo", "gdpo", "ppo")
    spec = {**spec, "data": str(paths["data"]), "work": str(work), "dump": str(paths["dump"])}
    spec["replay"] = str(paths["replay"]) if online else None
    paths["spec"].write_text(json.dumps(spec), encoding="utf-8")
    with Worker([str(interpreter), str(worker), str(paths["spec"])], log_path=paths["log"], patience=600) as worker:
        worker.start()
        results = [worker.step() for _ in range(spec["steps"])]
        worker.stop()
    found = torch.load(paths["dump"])
    logps = {tuple(row["ids"]): row["logps"] for row in found.pop("logps", [])}
    gradients = found.pop("gradients")
    more = {**found, "results": results}
    return Side(logps=logps, gradients=gradients, losses=[result["loss"] for result in results], more=more)


# ---------------------------------------------------------------------------------------------- ours


class Batches(L.LightningDataModule):
    """Groups in order, ROWS a batch."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__()
        self.groups = groups

    def train_dataloader(self) -> DataLoader[Any]:
        starts = range(0, len(self.groups), ROWS)
        batches = [GroupBatch.from_groups(self.groups[start : start + ROWS]) for start in starts]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Watch(L.Callback):
    """Gradients of the first update, before clipping; loss and metrics of all; the first batch with its advantages."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.updates: list[dict[str, float]] = []
        self.credited: GroupBatch | None = None

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        note, update = module.note_update, module.update

        def noted(*, metrics: Any, loss: float, **values: float) -> None:
            means = {name: float(total / count) for name, (total, count) in metrics.items()}
            self.updates.append({**means, "loss": loss})
            note(metrics=metrics, loss=loss, **values)

        def updated(batch: GroupBatch, *given: Any, **named: Any) -> None:
            self.credited = self.credited or batch
            update(batch, *given, **named)

        module.note_update, module.update = noted, updated

    def on_gradients(self, trainer: L.Trainer, module: L.LightningModule, norms: Any) -> None:
        if not self.gradients:
            named = module.named_parameters()
            self.gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


class Replay:
    """A rollout that says what the prompts' groups say already."""

    def __init__(self, module: Any, groups: Sequence[Group]) -> None:
        self.module, self.groups, self.version = module, groups, 0

    def sync(self, model: Any, version: int) -> None:
        self.version = version

    def generate(self, prompts: Sequence[Group], n: int, sampling: SamplingConfig, **keys: Any) -> Rollout:
        said = [[list(ids) for ids in self.groups[prompt.index].completions] for prompt in prompts]
        batch = GroupBatch.from_groups([replace(p, completions=c) for p, c in zip(prompts, said, strict=True)])
        with torch.no_grad():
            logps = self.module.engine(batch, temperature=sampling.score_temperature).logps
        cut = torch.tensor([ids[-1] != END for completions in said for ids in completions])
        return assemble(prompts, said, logps, cut, self.version, "cpu")


def ours(module: Any, groups: Sequence[Group], folder: Path, updates: int = 1) -> Side:
    """Train ours. updates: of one batch."""
    module.configure_model()
    first = GroupBatch.from_groups(groups[:ROWS])
    with torch.no_grad():
        logps = module.engine(first).logps
    parts = zip(rows_in(groups[:ROWS]), torch.split(logps, first.completion_lengths.tolist()), strict=True)
    if isinstance(module, GRPO | PPO):
        module.rollout = Replay(module, groups)
        groups = [replace(group, completions=()) for group in groups]
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[watch],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Batches(groups))
    losses = [update["loss"] for update in watch.updates]
    gradients = {theirs_of(name): value for name, value in watch.gradients.items()}
    return Side(
        logps=dict(parts),
        gradients=gradients,
        losses=[sum(losses[i : i + updates]) / updates for i in range(0, len(losses), updates)],
        more={"updates": watch.updates, "credited": watch.credited},
    )


def rows_in(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Prompt and completion ids of every completion."""
    return [(*group.prompt, *ids) for group in groups for ids in group.completions]


def theirs_of(name: str) -> str:
    """Our parameter's name in the peer's model; `critic/` stands before those of PPO's critic."""
    for start, other in (("heads.weight", "score.weight"), ("critic.trunk.", "critic/model."), ("policy.", "")):
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name.replace("critic.head.", "critic/score.")


# ---------------------------------------------------------------------------------------------- comparison


def row(what: str, ours: float, theirs: float, difference: float, bound: float) -> dict[str, Any]:
    return {
        "what": what,
        "ours": ours,
        "theirs": theirs,
        "difference": difference,
        "bound": bound,
        "ok": difference <= bound,
    }


def compared(what: str, mine: Side, peer: Side) -> list[dict[str, Any]]:
    """The rows that every method has."""
    rows = []
    if peer.logps:
        assert mine.logps.keys() >= peer.logps.keys(), "the sides saw different tokens"
        pairs = [(mine.logps[ids], values) for ids, values in peer.logps.items()]
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        rows.append(row(f"{what}: token log-probs", float(a.mean()), float(b.mean()), farthest(a, b), LOGP))
    rows += of_gradients(what, mine.gradients, peer.gradients)
    rows.append(row(f"{what}: first loss", mine.losses[0], peer.losses[0], abs(mine.losses[0] - peer.losses[0]), LOGP))
    far = farthest(torch.tensor(mine.losses), torch.tensor(peer.losses))
    rows.append(row(f"{what}: losses of {len(mine.losses)} steps", mine.losses[-1], peer.losses[-1], far, CURVE))
    return rows


def farthest(a: Tensor, b: Tensor) -> float:
    """Largest difference; NaN where one is."""
    assert a.shape == b.shape, f"{tuple(a.shape)} values beside {tuple(b.shape)}"
    return float((a - b).abs().max())


def of_gradients(what: str, mine: Mapping[str, Tensor], peer: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Cosine and relative difference of the norms. Raises AssertionError unless both have the same parameters."""
    assert mine.keys() == peer.keys(), f"{what}: gradients of {sorted(mine.keys() ^ peer.keys())} on one side only"
    a, b = (torch.cat([side[name].flatten().double() for name in sorted(mine)]) for side in (mine, peer))
    norms = float(a.norm()), float(b.norm())
    cosine = float(a @ b / (a.norm() * b.norm()))
    return [
        row(f"{what}: gradient, 1 - cosine", *norms, 1 - cosine, COSINE),
        row(f"{what}: gradient, norm (relative)", *norms, abs(norms[0] / norms[1] - 1), GRADIENT),
    ]


def of_ppo(mine: Side, peer: Side) -> list[dict[str, Any]]:
    """Values, advantages and returns of the first rollout, and both losses of all steps."""
    batch = mine.more["credited"]
    assert isinstance(batch, GroupBatch)
    values, raw = peer.more["values"], peer.more["advantages"]
    rows = []
    for name, found, expected in (
        ("values", batch.tokens["values"], values),
        ("whitened advantages", batch.tokens["advantages"], peer.more["whitened"]),
        ("advantages whitened by ours", whiten(raw.flatten(), torch.ones(raw.numel()).bool()), peer.more["whitened"]),
        ("returns", batch.tokens["returns"], raw + values),
    ):
        a, b = found.flatten(), expected.flatten()
        rows.append(row(f"PPO: {name}", float(a.norm()), float(b.norm()), farthest(a, b), LOGP))
    updates = mine.more["updates"]
    for name, key in (("policy_loss", "loss/policy_avg"), ("value_loss", "loss/value_avg")):
        a = torch.tensor([update[key] for update in updates]).view(-1, PPO_EPOCHS).mean(1)
        b = torch.tensor([result[name] for result in peer.more["results"]])
        rows.append(row(f"PPO: {name} of {len(a)} steps", float(a[-1]), float(b[-1]), farthest(a, b), CURVE))
    return rows


# ---------------------------------------------------------------------------------------------- methods


def cheap(completion: str, completion_ids: list[int], flat: bool) -> float:
    return token_rewards.cheap(completion_ids, flat)


def other(completion: str, completion_ids: list[int], flat: bool) -> float | None:
    """`raising`, None where it raises."""
    try:
        return token_rewards.raising(completion_ids, flat)
    except ValueError:
        return None


def here(reward: Callable[..., Any]) -> RewardSpec:
    return RewardSpec(reward=reward, in_process=True)


def compare(root: Path, steps: int, folder: Path) -> list[dict[str, Any]]:
    """All rows. root: where the peers' environments are."""
    save_models(folder)
    policy = PolicyConfig(name=str(folder / "policy"), dtype="float32")
    optim = OptimConfig(lr=LR, schedule="constant", warmup_steps=0)
    own: dict[str, Any] = {"policy": policy, "optim": optim, "micro_batch_tokens": None}
    base: dict[str, Any] = {
        "model": str(folder / "policy"),
        "reward_model": None,
        "steps": steps,
        "rows_per_step": ROWS,
        "lr": LR,
    }
    base |= {"completions": 1, "max_tokens": LENGTH, "clip_norm": 1.0, "beta": 0.1, "kl": 0.0, "rewards": ["cheap"]}
    newest = peers.python("1.16.0", root)
    rows: list[dict[str, Any]] = []

    def method(what: str, module: Any, groups: Sequence[Group], **spec: Any) -> None:
        peer = theirs({**base, "id": what.replace(" ", "-"), **spec}, groups, newest, folder)
        rows.extend(compared(what, ours(module, groups, folder), peer))

    method("SFT", SFT(**own), rows_of(1, steps), kind="sft")
    pairs = rows_of(2, steps)
    method("DPO", DPO(**own, beta=0.1, reference="copy"), pairs, kind="dpo")
    method("DPO cached", DPO(**own, beta=0.1, reference="copy"), pairs, kind="dpo", precompute_reference=True)
    scorer = RewardModel(**own)
    save_scorer(scorer, folder / "start")
    method("Reward model", scorer, pairs, kind="rm", reward_model=str(folder / "start"))
    online = {**own, "completions": GROUP, "sampling": SamplingConfig(max_tokens=LENGTH)}
    said = rows_of(GROUP, steps)
    given: dict[str, Any] = {"kind": "grpo", "completions": GROUP}
    method("GRPO", GRPO(**online, rewards={"cheap": here(cheap)}), said, **given)
    for name in ("k3", "k3_is"):
        module = GRPO(**online, rewards={"cheap": here(cheap)}, kl=KLConfig(coefficient=0.1, estimator=name))
        method(f"GRPO with {name}", module, said, **given, kl=0.1, kl_estimator=name)
    both = {"cheap": here(cheap), "raising": here(other)}
    given = {"kind": "gdpo", "completions": GROUP, "rewards": list(both)}
    method("GDPO", GDPO(**online, rewards=both, batch_eps=1e-4), said, **given)
    rows.extend(ppo(online, base, steps, root, folder))
    return rows


def save_scorer(module: RewardModel, folder: Path) -> None:
    """The reward model as it starts, as a sequence classifier."""
    module.configure_model()
    config = LlamaConfig.from_pretrained(module.policy_config.name, num_labels=1)
    classifier = LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
    state = {name.removeprefix("policy."): value for name, value in module.state_dict().items() if ".model." in name}
    classifier.load_state_dict({**state, "score.weight": module.heads.weight.detach()})
    classifier.save_pretrained(folder)
    module.tokenizer.save_pretrained(folder)


def ppo(
    online: Mapping[str, Any], base: Mapping[str, Any], steps: int, root: Path, folder: Path
) -> list[dict[str, Any]]:
    """PPO of 1.12.0, which does not clip gradients."""
    said = [replace(group, columns={"flat": False}) for group in rows_of(GROUP, steps, ends=False, fixed=True)]
    settings = {**online, "optim": replace(online["optim"], clip_norm=None)}
    critic = CriticConfig(kind="reward_model", reward_model=str(folder / "scorer"))
    module = PPO(**settings, rewards={"cheap": here(cheap)}, critic=critic, epochs=PPO_EPOCHS)
    spec = {**base, "id": "PPO", "kind": "ppo", "kl": 0.05, "completions": GROUP, "value_model": critic.reward_model}
    peer = theirs(spec, said, peers.python("1.12.0", root), folder)
    names = {"policy.": "", "value_model.": "critic/"}
    peer.gradients = {
        other + name.removeprefix(start): value
        for name, value in peer.gradients.items()
        for start, other in names.items()
        if name.startswith(start)
    }
    mine = ours(module, said, folder, updates=PPO_EPOCHS)
    return [*compared("PPO", mine, peer), *of_ppo(mine, peer)]


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every difference is within its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance.equality", description=__doc__)
    parser.add_argument("--root", type=Path, default=peers.ROOT, help="where the environments are")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON rows")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(options.root, options.steps, Path(folder).resolve())
    for found in rows:
        print(json.dumps(found), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(not all(found["ok"] for found in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
