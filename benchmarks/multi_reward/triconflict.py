"""TriConflict: three rewards that cannot all be had, on a task a 100,000-parameter model learns in seconds.

    prompt      2 to 4 symbols and `>`: easy, medium, hard, 7 : 2 : 1 in every batch       a f b >
    task        the symbols in reverse, then the end, within 12 tokens                     b f a <eos>
    accuracy    share of the symbols in their places                                       hard to move
    sentiment   min(1, polite words / 4)                                                   trivial to move
    efficiency  1 / (1 + ln tokens), the end counted                                       small in spread, trivial
    all three   halved for a completion without its end

Polite words (p1, p2) cost length, and length is what accuracy needs. Demonstrations of the base model get every second
symbol wrong, and hold fillers (f) and polite words. Twelve symbols (a to l) so that 256 held-out completions are of 128
prompts that no run trains on.
"""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.export import export
from benchmarks.multi_reward import EXPERIMENT
from benchmarks.online.bench import alignment, write_lines

SYMBOLS, POLITE, FILLER, ASK = "abcdefghijkl", ("p1", "p2"), "f0", ">"
SPECIALS = ("<pad>", "<bos>", "<eos>")
STRATA = {"easy": 2, "medium": 3, "hard": 4}
HELD_OUT = {"easy": 90, "medium": 26, "hard": 12}
HELD_OUT_LONG = {"easy": 12, "medium": 26, "hard": 90}
TRAINING = {"easy": 54, "medium": 600, "hard": 600}
LONGEST = 12
DEMONSTRATIONS = 25_600

LOW = {"accuracy": 0.0, "sentiment": 0.0, "efficiency": 1 / (1 + math.log(LONGEST))}
HIGH = {"accuracy": 1.0, "sentiment": 1.0, "efficiency": 1 / (1 + math.log(3))}
"""What counts as 0 and as 1: the shortest right answer to an easy prompt is 3 tokens."""


# ---------------------------------------------------------------------------------------------------- rewards


def _ended(truncated: bool) -> float:
    return 0.5 if truncated else 1.0


def accuracy(completion: str, prompt: str, truncated: bool) -> float:
    """Share of the symbols that stand where they should."""
    asked = [word for word in prompt.split() if word in SYMBOLS]
    said = [word for word in completion.split() if word in SYMBOLS]
    right = sum(a == b for a, b in zip(reversed(asked), said, strict=False))
    return right / len(asked) * _ended(truncated)


def sentiment(completion: str, truncated: bool) -> float:
    """Polite words, at most four of them."""
    return Polite(4)(completion, truncated)


def efficiency(completion: str, completion_ids: list[int], truncated: bool) -> float:
    """Fewer tokens; the end is one."""
    return 1 / (1 + math.log(max(1, len(completion_ids)))) * _ended(truncated)


class Polite:
    """Sentiment that `enough` polite words fill: the fewer, the less there is to choose between it and efficiency."""

    def __init__(self, enough: int) -> None:
        self.enough = enough

    def __call__(self, completion: str, truncated: bool) -> float:
        polite = sum(word in POLITE for word in completion.split())
        return min(1.0, polite / self.enough) * _ended(truncated)


class Scaled:
    """One of the three, `factor` times as large: what a badly chosen unit does."""

    def __init__(self, reward: str, factor: float) -> None:
        self.reward, self.factor = reward, factor

    def __call__(self, completion: str, prompt: str, completion_ids: list[int], truncated: bool) -> float:
        values = {
            "accuracy": lambda: accuracy(completion, prompt, truncated),
            "sentiment": lambda: sentiment(completion, truncated),
            "efficiency": lambda: efficiency(completion, completion_ids, truncated),
        }
        return self.factor * values[self.reward]()


# ---------------------------------------------------------------------------------------------------- files


def write_files(folder: Path) -> None:
    """`rl.jsonl`, `held_out.jsonl`, `held_out_long.jsonl`, `seen.jsonl` with a column `difficulty`, `sft.jsonl`; no
    prompt of the second and the third, which share some, is in another, and the fourth are some of the first."""
    draw = random.Random(0)
    training, held_out, long = [], [], []
    for name, length in STRATA.items():
        words = [" ".join(letters) for letters in product(SYMBOLS, repeat=length)]
        draw.shuffle(words)
        cut = HELD_OUT[name]
        held_out += [(name, word) for word in words[:cut]]
        training += [(name, word) for word in words[cut : cut + TRAINING[name]]]
        unseen = words[:cut] + words[cut + TRAINING[name] :]
        long += [(name, word) for word in unseen[: HELD_OUT_LONG[name]]]
    seen = [(name, word) for name in STRATA for word in [w for n, w in training if n == name][: HELD_OUT[name]]]
    for file, rows in (("rl", training), ("held_out", held_out), ("held_out_long", long), ("seen", seen)):
        lines = ({"prompt": f"{word} {ASK}", "difficulty": name} for name, word in rows)
        write_lines(folder / f"{file}.jsonl", lines)
    pools = {name: [word for kind, word in training if kind == name] for name in STRATA}
    kinds = draw.choices(list(STRATA), weights=(7, 2, 1), k=DEMONSTRATIONS)
    asked = [draw.choice(pools[kind]) for kind in kinds]
    write_lines(folder / "sft.jsonl", ({"prompt": f"{w} {ASK}", "completion": _demonstration(w, draw)} for w in asked))


def _demonstration(word: str, draw: random.Random) -> str:
    said = []
    for symbol in reversed(word.split()):
        if draw.random() < 0.2:
            said.append(FILLER)
        said.append(draw.choice(SYMBOLS) if draw.random() < 0.5 else symbol)
    if draw.random() < 0.25:
        said.insert(0 if draw.random() < 0.5 else len(said), draw.choice(POLITE))
    return " ".join(said)


def write_model(folder: Path) -> None:
    """A two-layer Llama with random weights, 100,000 parameters, and its tokenizer of 19 words."""
    vocabulary = {word: i for i, word in enumerate((*SPECIALS, ASK, *SYMBOLS, *POLITE, FILLER))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=FILLER))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos = SPECIALS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, bos_token=bos, eos_token=eos)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare() -> None:
    """The task's files and the base model, in the current folder."""
    write_files(Path())
    if Path("base").is_dir():
        return
    write_model(Path("start"))
    fit = alignment("fit", str(Path(__file__).with_name("triconflict_sft")), "sft", experiment=EXPERIMENT)
    export(fit.checkpoint, Path("base"), force=True)
