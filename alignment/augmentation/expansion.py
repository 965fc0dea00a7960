"""New prompts that ask what a prompt of the file asks, in other words.

A paraphrase keeps the replies and every other column of its source, so it is worth as much as it keeps the meaning.
Three things are asked of it: it lies inside the source's cluster (`alignment.augmentation.clusters`), it is not in the
file already, exactly or nearly, and, where a model wrote it, it keeps numbers, quoted texts and names.

All rows of a prompt (the comparisons of a preference file) are written for the new prompt too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.augmentation.clusters import Clusters, pieces, similarity
from alignment.augmentation.embedding import LSA, Embedder, load_embedder
from alignment.augmentation.paraphrase import Candidate, by_rule
from alignment.augmentation.rewriting import data_part, rewritten
from alignment.augmentation.rows import AUGMENTED, EXPANSION, NONE, SOURCE_ROW, Entry, Rows, origin
from alignment.errors import UserError
from alignment.randomness import derive
from datamodules.prepare import prompt_key
from datamodules.rows import RowError

COLUMNS = (AUGMENTED, EXPANSION, SOURCE_ROW)
RULE = "rule"
_AT_A_TIME = 16  # prompts whose paraphrases are made and judged together

Paraphraser = Callable[[Mapping[int, str], int], Mapping[int, Sequence[Candidate]]]
"""fn(texts by number, count) -> at most `count` candidates for each number. A pure function of each text by itself."""


@dataclass(frozen=True, kw_only=True)
class ExpansionConfig:
    """How many prompts are made, how, and how near they must stay.

    Args:
        share: new prompts wanted for each prompt of the file, above 0 and at most 1.
        candidates: paraphrases tried for a prompt; the first good one is kept.
        paraphrase: `rule`, or a causal language model: a hub id, a folder, a checkpoint or a run.
        embedding: `lsa`, or a sentence-transformers model by folder or hub id.
        clusters: how many. None: the square root of half the number of prompts.
        quantile: of the distances of a cluster's members to its centre; a new prompt may be that far from it.
        similarity: a new prompt with this share of five-character pieces in common with another is a near duplicate.
        seed: of every choice.
    """

    share: float = 0.2
    candidates: int = 6
    paraphrase: str = RULE
    embedding: str = LSA
    clusters: int | None = None
    quantile: float = 0.9
    similarity: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "quantile", "similarity"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UserError(f"--{name} is {value}; it must be above 0 and at most 1")
        if self.candidates < 1:
            raise UserError(f"--candidates is {self.candidates}; at least 1 paraphrase must be tried")
        if self.clusters is not None and self.clusters < 1:
            raise UserError(f"--clusters is {self.clusters}; there is at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """What came of it.

    Args:
        rows: everything to write: each row of the file, and behind the last row of a prompt those of its paraphrase.
        counts: prompts and rows made, clusters, and candidates refused by reason.
        rates: mean distance of the file's prompts and of the new ones to their cluster's centre.
    """

    rows: list[dict[str, Any]]
    counts: dict[str, int]
    rates: dict[str, float]


def rule_paraphraser(seed: int) -> Paraphraser:
    """By rule."""
    return lambda texts, count: {number: by_rule(text, count, seed) for number, text in texts.items()}


def expand(rows: Rows, config: ExpansionConfig, paraphraser: Paraphraser) -> Expanded:
    """Add paraphrased prompts until there are `share` of the file's prompts, or no prompt is left to try.

    Raises UserError for a file without prompts or with fewer than two, and where nothing could be made.
    """
    rows.check_new_columns(COLUMNS)
    prompts = _prompts(rows)
    texts = [entries[0].asked for entries in prompts]
    embed = load_embedder(config.embedding, texts, config.seed)
    search = _Search(rows, prompts, config, embed)
    wanted = max(1, round(config.share * len(prompts)))
    order = sorted(range(len(prompts)), key=lambda i: derive(config.seed, "expanded prompt", texts[i]))
    order = [i for i in order if prompts[i][0].original]
    for first in range(0, len(order), _AT_A_TIME):
        part = order[first : first + _AT_A_TIME]
        parts = {i: data_part(rows, prompts[i][0]) for i in part}
        asked = {prompts[i][0].number: _instruction(*parts[i]) for i in part}
        made = paraphraser(asked, config.candidates)
        for i in part:
            number, (before, given) = prompts[i][0].number, parts[i]
            rest = before[len(asked[number]) :] + given if before else ""
            if len(search.found) < wanted:
                search.judge(i, [Candidate(new.text.strip() + rest, new.by) for new in made.get(number, ())])
        if len(search.found) == wanted:
            break
    if not search.found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in search.refused.items()) or "no candidate was made"
        raise UserError(f"no new prompt could be made of '{rows.path}': {reasons}; see docs/augment.md")
    return search.result(wanted)


def _instruction(before: str, given: str) -> str:
    """What is paraphrased: the instruction above an input, which is data and stays, else the whole turn."""
    return before.rstrip() if before else given


def _prompts(rows: Rows) -> list[list[Entry]]:
    """The rows of each different prompt, in the order in which prompts first come."""
    found: dict[int, list[Entry]] = {}
    for entry in rows.entries:
        if entry.asked.strip():
            found.setdefault(entry.prompt_key, []).append(entry)
    if len(found) < 2:
        raise UserError(
            f"'{rows.path}', read as {rows.format}, has {len(found)} different prompts; clusters need at least 2"
        )
    return list(found.values())


class _Search:
    """Prompts found so far, and why others were refused."""

    def __init__(self, rows: Rows, prompts: list[list[Entry]], config: ExpansionConfig, embed: Embedder) -> None:
        self._rows, self._prompts, self._config, self._embed = rows, prompts, config, embed
        vectors = embed([entries[0].asked for entries in prompts])
        self.clusters = Clusters(vectors, count=config.clusters, quantile=config.quantile, seed=config.seed)
        self._before = self.clusters.distance(vectors, self.clusters.of)
        self._keys = {entries[0].prompt_key for entries in prompts}
        self._near: dict[int, list[frozenset[str]]] = {}
        for entries, cluster in zip(prompts, self.clusters.of.tolist(), strict=True):
            self._near.setdefault(cluster, []).append(pieces(entries[0].asked))
        self.found: dict[int, list[dict[str, Any]]] = {}  # place of the source prompt -> rows of the new one
        self._distances: list[float] = []
        self.refused: Counter[str] = Counter()
        self._by: Counter[str] = Counter()

    def judge(self, place: int, candidates: Sequence[Candidate]) -> None:
        """Keep the first candidate for prompt `place` that is good."""
        if not candidates:
            self.refused["prompts without a candidate"] += 1
            return
        cluster = int(self.clusters.of[place])
        vectors = self._embed([candidate.text for candidate in candidates])
        inside = self.clusters.inside(vectors, [cluster] * len(candidates))
        for i, candidate in enumerate(candidates):
            if not inside[i]:
                self.refused["candidates outside the cluster"] += 1
            elif (made := self._made(place, candidate, cluster)) is not None:
                self.found[place] = made
                self._by[candidate.by] += 1
                self._distances += self.clusters.distance(vectors[i : i + 1], [cluster]).tolist()
                return

    def _made(self, place: int, candidate: Candidate, cluster: int) -> list[dict[str, Any]] | None:
        """The rows of a new prompt; None, with the reason counted, where it is not new or cannot be written."""
        own = pieces(candidate.text)
        made = []
        try:
            for entry in self._prompts[place]:
                values, row = rewritten(self._rows, entry, prompt=candidate.text)
                marks = {AUGMENTED: True, EXPANSION: candidate.by, SOURCE_ROW: origin(entry)}
                made.append(values | marks)
        except RowError:
            self.refused["candidates that the format cannot hold"] += 1
            return None
        if (key := prompt_key(row)) in self._keys:
            self.refused["candidates that are there already"] += 1
            return None
        if any(similarity(own, other) >= self._config.similarity for other in self._near[cluster]):
            self.refused["candidates that are nearly there"] += 1
            return None
        self._keys.add(key)
        self._near[cluster].append(own)
        return made

    def result(self, wanted: int) -> Expanded:
        last = {entries[-1].number: place for place, entries in enumerate(self._prompts)}
        written: list[dict[str, Any]] = []
        for entry in self._rows.entries:
            written.append(_marked(entry))
            written += self.found.get(last.get(entry.number, -1), [])
        counts = {
            "prompts": len(self._prompts),
            "clusters": len(self.clusters.centres),
            "new prompts wanted": wanted,
            "new prompts": len(self.found),
            "new rows": sum(map(len, self.found.values())),
        }
        counts |= {f"by {name}": count for name, count in sorted(self._by.items())} | dict(self.refused)
        rates = {
            "mean distance to the centre": float(self._before.mean()),
            "mean distance of new prompts": sum(self._distances) / len(self._distances),
        }
        return Expanded(rows=written, counts=counts, rates=rates)


def _marked(entry: Entry) -> dict[str, Any]:
    values = dict(entry.values)
    marks = {
        AUGMENTED: not entry.original,
        EXPANSION: values.get(EXPANSION) or NONE,
        SOURCE_ROW: origin(entry),
    }
    return values | marks
