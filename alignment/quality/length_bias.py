"""Whether the longer completion wins. Policies learn that first: Singhal et al., A Long Way to Go, arXiv:2310.03716."""

from __future__ import annotations

from statistics import fmean

from alignment.quality.findings import Faults, Finding, percent, share, wilson
from alignment.quality.reading import Corpus
from alignment.quality.settings import Settings


def length_bias(corpus: Corpus, settings: Settings) -> Finding:
    """Accuracy of the rule "the longer completion is the chosen one" over pairs of different length, in characters.

    Value: the end nearest to 0.5 of the 95 % interval of that accuracy, counted from the side that wins: what a rule of
    thumb (longer, or shorter) surely gets right. 0.5 where the interval holds 0.5.
    """
    limit = settings.limit("length_bias")
    pairs = [(e, *e.pair) for e in corpus.examples if e.pair is not None]
    if not pairs:
        return Finding(check="length_bias", limit=limit, measured="not measurable: no pairs")
    differences = [len(chosen) - len(rejected) for _, chosen, rejected in pairs]
    longer, shorter = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    differ = longer + shorter
    low, high = wilson(longer, differ)
    value = max(0.5, low, 1 - high)
    side = "longer" if longer >= shorter else "shorter"
    mean_chosen = fmean(len(chosen) for _, chosen, _ in pairs)
    mean_rejected = fmean(len(rejected) for _, _, rejected in pairs)
    extreme = Faults(what=f"the {side} one wins, and by a factor of two or more", show=settings.show)
    for example, chosen, rejected in pairs:
        more, less = (chosen, rejected) if side == "longer" else (rejected, chosen)
        if len(more) >= 2 * len(less):
            extreme.add(example.place)
    return Finding(
        check="length_bias",
        limit=limit,
        value=value,
        measured=f"chosen is longer in {percent(share(longer, len(pairs)))} of {len(pairs):,} pairs, by "
        f"{mean_chosen - mean_rejected:+.0f} characters on average; 'longer wins' is right "
        f"{share(longer, differ):.3f} ({low:.3f} to {high:.3f}) of the time",
        advice="balance lengths within pairs, or discount length in the loss (model.ld_alpha of modules.DPO; "
        "modules.SimPO)",
        figures={
            "pairs": len(pairs),
            "longer": share(longer, len(pairs)),
            "equal": share(len(pairs) - differ, len(pairs)),
            "mean_difference": mean_chosen - mean_rejected,
            "mean_chosen": mean_chosen,
            "mean_rejected": mean_rejected,
            "accuracy": share(longer, differ),
            "accuracy_low": low,
            "accuracy_high": high,
        },
        faults=[extreme],
    )
