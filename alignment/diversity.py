"""How different replies to one prompt are."""

from __future__ import annotations

from collections.abc import Sequence

from torchmetrics.functional.text import sacre_bleu_score


def distinct(replies: Sequence[str], n: int) -> float:
    """Different n-grams of words over all n-grams of these replies (Li et al. 2016, arXiv 1510.03055); 0 where there is
    none."""
    words = [reply.lower().split() for reply in replies]
    grams = [tuple(reply[i : i + n]) for reply in words for i in range(len(reply) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def self_bleu(said: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU-4 (13a tokens, lower case) of all replies, each against the others to its prompt; 0 to 1, less is
    more diverse (Zhu et al. 2018, arXiv 1802.01886). N-grams are counted over all of them, since BLEU of a single short
    reply is 0 as soon as it shares no four words. Needs two replies to each prompt."""
    texts = [reply for replies in said for reply in replies]
    others = [[*replies[:i], *replies[i + 1 :]] for replies in said for i in range(len(replies))]
    return float(sacre_bleu_score(texts, others, lowercase=True))
