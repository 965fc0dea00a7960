"""`python -m benchmarks.preferences`: our preference losses beside those of TRL 1.16.0.

values      token log-probs of policy and reference are drawn, with the rest of what a loss reads, and both sides
            compute the loss of the same numbers, in fp32: ours through the whole module, with micro-batches. Must agree
            to 1e-5, of the loss's size where that is above 1.
training    both sides train the same small Llama on the same rows (`benchmarks.performance.equality`): first gradient,
            losses of all steps.

Writes JSON rows {what, ours, theirs, difference, bound, ok}; reports/preferences.md is made of them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.advantages import RewardTable
from alignment.batches import Group, GroupBatch
from alignment.experience import ADVANTAGE, REF_LOGPS
from alignment.logprobs import TokenStats
from alignment.optim import OptimConfig
from alignment.policy import PolicyConfig
from alignment.rewards import RewardSpec
from alignment.rollout import SAMPLER_LOGPS
from alignment.sampled_pairs import best_and_worst, take_pairs
from alignment.update import Counts
from benchmarks.performance import equality, peers
from modules import CPO, DPO, KTO, ORPO, OnlineDPO, SimPO

Row = dict[str, Any]
TRL = "1.16.0"
VALUES, TRAINING = (Path(__file__).with_name(f"trl_{part}.py") for part in ("values", "training"))
BOUND = 1e-5
PAIRS = 12
TINY = PolicyConfig(name="tiny")

MIX = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
ONLINE: Row = {"rewards": {"short": RewardSpec(reward="Efficiency", in_process=True)}}
"""It is never asked: scores are drawn."""

# (name, our module, our settings, TRL's trainer, its settings)
CASES: tuple[tuple[str, type, Row, str, Row], ...] = (
    *(
        (name, DPO, {"loss": ours, **more}, "dpo", {"loss_type": [theirs], **more})
        for name, ours, theirs, more in (
            ("sigmoid", "sigmoid", "sigmoid", {"beta": 0.1}),
            ("sigmoid_norm", "sigmoid_norm", "sigmoid_norm", {"beta": 2.0}),
            ("hinge", "hinge", "hinge", {"beta": 0.1}),
            ("ipo", "ipo", "ipo", {"beta": 0.1}),
            ("exo", "exo", "exo_pair", {"beta": 0.1, "label_smoothing": 1e-3}),
            ("nca", "nca", "nca_pair", {"beta": 0.1}),
            ("robust", "robust", "robust", {"beta": 0.1, "label_smoothing": 0.1}),
            ("bco_pair", "bco_pair", "bco_pair", {"beta": 0.1}),
            ("sppo_hard", "sppo_hard", "sppo_hard", {"beta": 0.1}),
            ("aot", "aot", "aot", {"beta": 0.1}),
            ("aot, smoothed", "aot", "aot", {"beta": 0.1, "label_smoothing": 0.1}),
            ("aot_unpaired", "aot_unpaired", "aot_unpaired", {"beta": 0.1}),
            ("apo_zero", "apo_zero", "apo_zero", {"beta": 0.1}),
            ("apo_down", "apo_down", "apo_down", {"beta": 0.1}),
            ("discopop", "discopop", "discopop", {"beta": 0.05}),
        )
    ),
    ("LD-DPO", DPO, {"ld_alpha": 0.5}, "dpo", {"ld_alpha": 0.5}),
    ("mix with sft", DPO, {"loss": MIX}, "dpo", {"loss_type": list(MIX), "loss_weights": list(MIX.values())}),
    ("WPO", DPO, {"weighting": "wpo"}, "dpo", {"use_weighting": True}),
    ("forward KL", DPO, {"divergence": "forward_kl"}, "dpo", {"f_divergence_type": "forward_kl"}),
    ("JS", DPO, {"divergence": "js"}, "dpo", {"f_divergence_type": "js_divergence"}),
    ("alpha 0.5", DPO, {"divergence": "alpha"}, "dpo", {"f_divergence_type": "alpha_divergence"}),
    (
        "ipo under forward KL",
        DPO,
        {"loss": "ipo", "divergence": "forward_kl"},
        "dpo",
        {"loss_type": ["ipo"], "f_divergence_type": "forward_kl"},
    ),
    ("KTO", KTO, {"bad_weight": 1.5}, "kto", {"loss_type": "kto", "undesirable_weight": 1.5}),
    ("KTO, APO-zero", KTO, {"loss": "apo_zero"}, "kto", {"loss_type": "apo_zero_unpaired"}),
    ("SimPO", SimPO, {}, "cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5}),
    (
        "SimPO, smoothed",
        SimPO,
        {"label_smoothing": 0.1},
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1},
    ),
    ("CPO", CPO, {"sft_weight": 0.0}, "cpo", {"loss_type": "sigmoid", "beta": 0.1}),
    (
        "CPO, smoothed",
        CPO,
        {"sft_weight": 0.0, "label_smoothing": 0.1},
        "cpo",
        {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.1},
    ),
    ("CPO, hinge", CPO, {"sft_weight": 0.0, "loss": "hinge"}, "cpo", {"loss_type": "hinge", "beta": 0.1}),
    ("CPO, ipo", CPO, {"sft_weight": 0.0, "loss": "ipo"}, "cpo", {"loss_type": "ipo", "beta": 0.1}),
    ("ORPO's odds ratio", ORPO, {"sft_weight": 0.0}, "orpo", {"beta": 0.1}),
    ("online DPO", OnlineDPO, ONLINE, "online_dpo", {"loss_type": "sigmoid", "beta": 0.1}),
    ("online DPO, ipo", OnlineDPO, {"loss": "ipo_sum", **ONLINE}, "online_dpo", {"loss_type": "ipo", "beta": 0.1}),
)


# ---------------------------------------------------------------------------------------------- values


def drawn(seed: int) -> tuple[list[Row], GroupBatch]:
    """Pairs as both sides take them. Completions of 1 to 9 tokens; the first of each pair is good, the second bad."""
    draw = random.Random(seed)
    pairs: list[Row] = [{side: _completion(draw) for side in ("chosen", "rejected")} for _ in range(PAIRS)]
    groups = [
        Group(prompt=[i + 4], completions=[[5] * len(pair[side]["policy"]) for side in pair], index=i)
        for i, pair in enumerate(pairs)
    ]
    return pairs, with_values(groups, [pair[side] for pair in pairs for side in pair])


def _completion(draw: random.Random) -> dict[str, list[float]]:
    policy = [-3 * draw.random() for _ in range(draw.randint(1, 9))]
    reference = [min(-0.01, x + draw.gauss(0, 0.5)) for x in policy]
    return {"policy": policy, "reference": reference, "collision": [-2 * draw.random() for _ in policy]}


def with_values(groups: Sequence[Group], rows: Sequence[Mapping[str, list[float]]]) -> GroupBatch:
    """A batch whose tokens hold what the models would say of them."""
    names = ("policy", "reference", "collision")
    values = {name: torch.tensor([x for row in rows for x in row[name]]) for name in names}
    return GroupBatch.from_groups(groups).with_tokens(**values)


def said(batch: GroupBatch, **asked: Any) -> TokenStats:
    """Stands for the engine. No loss here reads the entropies, which are 0."""
    logps = batch.tokens["policy"].clone().requires_grad_()
    entropy = torch.zeros_like(batch.tokens["policy"])
    return TokenStats(logps=logps, entropy=entropy, hidden=None, collision=batch.tokens["collision"])


def ours(kind: type, settings: Row, batch: GroupBatch) -> float:
    """The loss of the batch through the module, in micro-batches of three pairs or so."""
    module: Any = kind(policy=TINY, micro_batch_tokens=30, **settings)
    module.engine = said
    module.reference_logps = lambda micro: micro.tokens["reference"]
    counts = Counts.of(batch)
    parts = [module.loss(micro, counts)[0] for micro in module.whole_batch(batch).split(30)]
    assert len(parts) > 2, "there are several micro-batches"
    return float(torch.stack(parts).sum().detach())


def labelled(seed: int) -> tuple[list[Row], GroupBatch]:
    """Rows of KTO with the values of their mismatched completions, which both sides are given."""
    draw = random.Random(seed)
    rows: list[Row] = [
        {"said": _completion(draw), "other": _completion(draw), "label": draw.random() < 0.6} for _ in range(PAIRS)
    ]
    groups = [
        Group(prompt=[i + 4], completions=[[5] * len(r["said"]["policy"])], rows={"label": [float(r["label"])]})
        for i, r in enumerate(rows)
    ]
    return rows, with_values(groups, [row["said"] for row in rows])


def sampled(seed: int) -> tuple[list[Row], GroupBatch]:
    """Two completions of each prompt with a score each, and the pairs that online DPO makes of them."""
    draw = random.Random(seed)
    rows: list[Row] = [
        {"first": _completion(draw), "second": _completion(draw), "scores": [draw.random(), draw.random()]}
        for _ in range(PAIRS)
    ]
    said_of = [[row["first"], row["second"]] for row in rows]
    groups = [
        Group(prompt=[i + 4], completions=[[5] * len(one["policy"]) for one in both], index=i)
        for i, both in enumerate(said_of)
    ]
    batch = with_values(groups, [one for both in said_of for one in both])
    scores = torch.tensor([score for row in rows for score in row["scores"]])
    table = RewardTable.of_scores(scores, batch.group_of, PAIRS)
    signal = best_and_worst(table, torch.ones(len(scores), dtype=torch.bool))
    tokens = {REF_LOGPS: batch.tokens["reference"], SAMPLER_LOGPS: batch.tokens["policy"]}
    return rows, take_pairs(batch.with_rows(**{ADVANTAGE: signal}).with_tokens(**tokens))


def kto(settings: Row, rows: Sequence[Row], batch: GroupBatch) -> float:
    """As `ours`; the pass over mismatched completions is given the same ones as TRL."""
    from modules import kto as own

    others = [Group(prompt=[i + 4], completions=[[5] * len(r["other"]["policy"])]) for i, r in enumerate(rows)]
    mismatched, own.mismatched = own.mismatched, lambda _: with_values(others, [row["other"] for row in rows])
    try:
        return ours(KTO, settings, batch)
    finally:
        own.mismatched = mismatched


def given(trainer: str) -> tuple[list[Row], GroupBatch]:
    """Rows for one of TRL's trainers, and the same as a batch for our module."""
    if trainer == "kto":
        return labelled(1)
    return sampled(2) if trainer == "online_dpo" else drawn(0)


def our_values() -> list[float]:
    """Our loss of each of `CASES`."""
    found = []
    for _, kind, settings, trainer, _ in CASES:
        rows, batch = given(trainer)
        found.append(kto(settings, rows, batch) if kind is KTO else ours(kind, settings, batch))
    return found


def values(root: Path, folder: Path) -> list[Row]:
    """One row for each of `CASES`."""
    cases = [
        {"trainer": trainer, "settings": theirs, "rows": given(trainer)[0]} for _, _, _, trainer, theirs in CASES
    ]
    (folder / "in.json").write_text(json.dumps({"cases": cases}), encoding="utf-8")
    command = [str(peers.python(TRL, root)), str(VALUES), str(folder / "in.json"), str(folder / "out.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    rows = []
    for (name, *_), own, theirs in zip(CASES, our_values(), found, strict=True):
        rows.append(equality.row(f"{name}: loss", own, theirs, abs(own - theirs) / max(1, abs(theirs)), BOUND))
    return rows


# ---------------------------------------------------------------------------------------------- training


def training(root: Path, steps: int, folder: Path) -> list[Row]:
    """Rows of `equality.compared` for methods whose arithmetic is more than a function of pairs."""
    equality.save_models(folder)
    own: Row = {
        "policy": PolicyConfig(name=str(folder / "policy"), dtype="float32"),
        "optim": OptimConfig(lr=equality.LR, schedule="constant", warmup_steps=0),
        "micro_batch_tokens": None,
    }
    base: Row = {"model": str(folder / "policy"), "steps": steps, "rows_per_step": equality.ROWS, "lr": equality.LR}
    base |= {"completions": 1, "clip_norm": 1.0, "beta": 0.1}
    pairs = equality.rows_of(2, steps)
    labels = [replace(g, rows={"label": [float(g.index % 3 > 0)]}) for g in equality.rows_of(1, steps)]
    referenced: Row = {**own, "reference": "copy"}
    rows: list[Row] = []

    def method(what: str, module: Any, groups: Sequence[Group], kind: str, **trl_args: Any) -> None:
        spec = {**base, "id": what.replace(" ", "-"), "kind": kind, "trl_args": trl_args}
        peer = equality.theirs(spec, groups, peers.python(TRL, root), folder, TRAINING)
        mine = equality.ours(module, groups, folder)
        # KTO also scores mismatched completions, which are no rows.
        known: dict[tuple[int, ...], Tensor] = {ids: v for ids, v in peer.logps.items() if ids in mine.logps}
        rows.extend(equality.compared(what, mine, replace(peer, logps=known)))

    mixed = {"loss_type": list(MIX), "loss_weights": list(MIX.values())}
    method("DPO mix", DPO(**referenced, loss=MIX), pairs, "dpo", **mixed)
    method("AOT", DPO(**referenced, loss="aot"), pairs, "dpo", loss_type=["aot"])
    method("WPO", DPO(**referenced, weighting="wpo"), pairs, "dpo", use_weighting=True)
    method("KTO", KTO(**referenced), labels, "kto")
    method("SimPO", SimPO(**own), pairs, "cpo", loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0.0)
    method("CPO", CPO(**own), pairs, "cpo")
    method("ORPO without its NLL", ORPO(**own, sft_weight=0.0), pairs, "orpo")
    return rows


def report(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "# Preference losses beside TRL's",
        "",
        f"Made by `python -m benchmarks.preferences`, TRL {TRL}, fp32, one CPU core. `loss`: the same drawn log-probs",
        f"on both sides, ours in micro-batches; differences are relative where the loss is above 1, at most {BOUND:g}.",
        "The rest: the same small Llama trained on the same rows.",
        "",
        "| what | ours | TRL | difference | bound | |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        numbers = f"{r['ours']:.6f} | {r['theirs']:.6f} | {r['difference']:.1e} | {r['bound']:g}"
        lines.append(f"| {r['what']} | {numbers} | {'' if r['ok'] else 'differs'} |")
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every difference is within its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preferences", description=__doc__)
    parser.add_argument("--root", type=Path, default=peers.ROOT, help="where the environments are")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=("values", "training"), default=None)
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON rows; the report goes beside it")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        if options.only != "training":
            rows += values(options.root, folder)
        if options.only != "values":
            rows += training(options.root, options.steps, folder)
    for found in rows:
        print(json.dumps(found), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(report(rows), encoding="utf-8")
    return int(not all(found["ok"] for found in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
