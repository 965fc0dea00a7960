"""Lengths in tokens, by the tokenisation of a run, against the limits of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alignment.chat import ChatEncoder, TemplateRefused
from alignment.policy import PolicyConfig, load_tokenizer
from alignment.quality.findings import Faults, Finding, percent, share
from alignment.quality.reading import Corpus, Example
from alignment.quality.settings import Settings

_BARS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class _Length:
    """Tokens of a row: of its prompt, and of each completion."""

    place: str
    prompt: int
    completions: Sequence[int]

    @property
    def longest(self) -> int:
        return max(self.completions, default=0)


def tokens(corpus: Corpus, settings: Settings) -> Finding:
    """Value: share of the rows that a limit cuts. Prompts count with their template, completions with their end."""
    limit = settings.limit("tokens")
    if settings.tokenizer is None:
        return Finding(
            check="tokens",
            limit=limit,
            measured="not measurable: no tokenizer is named",
            advice="name the policy's: --tokenizer NAME (a folder, a hub id, a .gguf file, tiny)",
        )
    encoder = ChatEncoder(tokenizer=load_tokenizer(PolicyConfig(name=settings.tokenizer)), template=settings.template)
    refused = Faults(what="refused by the chat template", show=settings.show)
    lengths = []
    for example in corpus.examples:
        try:
            prompt = len(_prompt(encoder, example))
        except TemplateRefused:
            refused.add(example.place)
            continue
        completions = [len(encoder.completion(text, raw=example.raw)) for text in example.completions]
        lengths.append(_Length(example.place, prompt, completions))
    prompts, completions = [n.prompt for n in lengths], [c for n in lengths for c in n.completions]
    cut, faults = _over(lengths, settings)
    rows = len(lengths)
    return Finding(
        check="tokens",
        limit=limit,
        value=share(cut, rows) if rows else None,
        measured=f"prompt {_quantiles(prompts)}, completion {_quantiles(completions)} (median, 95 %, longest); a limit "
        f"cuts {cut:,} of {rows:,} rows ({percent(share(cut, rows))})",
        advice="raise --data.max_prompt_tokens or --data.max_completion_tokens, or shorten or drop these rows",
        figures={
            "rows": rows,
            "cut": cut,
            **{f"over_{name}": fault.count for name, fault in faults.items()},
            "refused": refused.count,
            **_figures("prompt", prompts),
            **_figures("completion", completions),
            "total_tokens": sum(prompts) + sum(completions),
        },
        histogram=_histogram([n.prompt + n.longest for n in lengths]),
        faults=[*faults.values(), refused],
    )


def _over(lengths: Sequence[_Length], settings: Settings) -> tuple[int, dict[str, Faults]]:
    """(rows that are cut, the rows over each limit). A prompt is cut before a completion is, as in a run."""
    most_prompt, most_completion, most = settings.max_prompt_tokens, settings.max_completion_tokens, settings.max_tokens
    faults = {
        "prompt": Faults(what=f"prompt over {most_prompt} tokens", show=settings.show),
        "completion": Faults(what=f"completion over {most_completion} tokens", show=settings.show),
        "both": Faults(what=f"prompt and completion over {most} tokens", show=settings.show),
    }
    cut = 0
    for row in lengths:
        kept = row.prompt if most_prompt is None else min(row.prompt, most_prompt)
        told = f"{row.place} ({row.prompt} + {row.longest})"
        limits = (("prompt", row.prompt, most_prompt), ("completion", row.longest, most_completion))
        over = [name for name, n, at_most in (*limits, ("both", kept + row.longest, most)) if at_most and n > at_most]
        for name in over:
            faults[name].add(told)
        cut += bool(over)
    return cut, faults


def _prompt(encoder: ChatEncoder, example: Example) -> list[int]:
    messages = example.messages
    if encoder.template == "raw" and not isinstance(messages, str) and [m.role for m in messages] == ["user"]:
        messages = messages[0].content  # as a run does: one text, which only its format made a message
    return encoder.prompt(messages, raw=example.raw)


def _figures(name: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    values = np.percentile(lengths, (50, 95, 99), method="inverted_cdf")
    labels = (f"{name}_p50", f"{name}_p95", f"{name}_p99")
    return {**dict(zip(labels, map(float, values), strict=True)), f"{name}_longest": float(max(lengths))}


def _quantiles(lengths: Sequence[int]) -> str:
    if not lengths:
        return "none"
    middle, tail = np.percentile(lengths, (50, 95), method="inverted_cdf")
    return f"{middle:.0f}, {tail:.0f}, {max(lengths)}"


def _histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Rows by the tokens of prompt and longest completion together."""
    edges = pairwise((0, *_BARS))
    counts = {f"{low + 1} to {high}": sum(low < n <= high for n in lengths) for low, high in edges}
    counts[f"more than {_BARS[-1]}"] = sum(n > _BARS[-1] for n in lengths)
    return {label: count for label, count in counts.items() if count}
