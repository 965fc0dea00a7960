"""Rows that a run cannot use, and comparisons for each prompt."""

from __future__ import annotations

from statistics import mean, median

from alignment.quality.findings import Faults, Finding, bars, percent, share
from alignment.quality.reading import Corpus, normal
from alignment.quality.settings import Settings


def rows(corpus: Corpus, settings: Settings) -> Finding:
    """The share of rows that the readers drop, with their reasons."""
    reports = [source.report for source in corpus.sources]
    read, used = sum(report.read for report in reports), sum(report.used for report in reports)
    faults: dict[str, Faults] = {}
    for report in reports:
        for reason, tally in report.dropped.items():
            fault = faults.setdefault(reason, Faults(what=reason, show=settings.show))
            for place in tally.places:
                fault.add(place)
            fault.count += tally.count - len(tally.places)  # readers remember the first places only
    kinds = ", ".join(dict.fromkeys(report.format for report in reports))
    splits = {name: sum(e.split == name for e in corpus.examples) for name in corpus.splits}
    return Finding(
        check="rows",
        limit=settings.limit("rows"),
        value=share(read - used, read),
        measured=f"{read:,} read as {kinds}; {read - used:,} cannot be used",
        advice="mend or remove them; a run leaves them out, or stops with on_bad_row: stop",
        figures={"read": read, "used": used, "unusable": read - used, "splits": splits, "format": kinds},
        faults=list(faults.values()),
    )


def comparisons(corpus: Corpus, settings: Settings) -> Finding:
    """How many different comparisons a prompt has: different pairs of completions, or different labelled completions.

    Value: share of the prompts with fewer than `settings.comparisons`. Repeated pairs count once, whoever judged them.
    """
    limit = settings.limit("comparisons")
    judged = [e for e in corpus.examples if e.kind in ("preference", "unpaired")]
    if not judged:
        return Finding(check="comparisons", limit=limit, measured="not measurable: nothing is compared")
    different: dict[tuple[str, int], set[frozenset[str]]] = {}
    first: dict[tuple[str, int], str] = {}
    for example in judged:
        prompt = (example.split, example.key)
        different.setdefault(prompt, set()).add(frozenset(map(normal, example.completions)))
        first.setdefault(prompt, example.place)
    counts = {prompt: len(pairs) for prompt, pairs in different.items()}
    few = Faults(what=f"prompts with fewer than {settings.comparisons}, by their first row", show=settings.show)
    for prompt, count in counts.items():
        if count < settings.comparisons:
            few.add(first[prompt])
    numbers = list(counts.values())
    return Finding(
        check="comparisons",
        limit=limit,
        value=share(few.count, len(numbers)),
        measured=f"{mean(numbers):.1f} for each of {len(numbers):,} prompts; {percent(share(few.count, len(numbers)))} "
        f"have fewer than {settings.comparisons}",
        advice="have more completions of each prompt compared (modules.OnlineDPO makes pairs itself), or fewer prompts",
        figures={
            "prompts": len(numbers),
            "mean": mean(numbers),
            "median": float(median(numbers)),
            "fewer": few.count,
            "wanted": settings.comparisons,
        },
        histogram=bars(numbers),
        faults=[few],
    )
