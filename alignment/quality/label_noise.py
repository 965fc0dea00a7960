"""Judgements that contradict each other, and judgements that a simple model would not have made.

`contradictions`: judgements are edges from the better completion to the worse one of a prompt. An edge inside a
strongly connected component lies on a cycle (A over B, B over A; or A over B over C over A): not all can be right.

`label_noise`: confident learning (Northcutt et al., arXiv:1911.00068). A logistic regression on words, cross-validated
by prompt, gives each label a probability from rows that are not of the same prompt. A row is off the diagonal of the
confident joint where the other label is as probable as that label is, on average, for the rows that have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment.quality.findings import Faults, Finding, needed, percent, share
from alignment.quality.reading import Corpus, Example, normal
from alignment.quality.settings import Settings

_FOLDS = 5
_LEAST_ROWS = 50
_MOST_ROWS = 20_000
"""Rows that the model is fitted on; more change its estimate little and take minutes."""
_LEAST_ACCURACY = 0.65
"""A model that is right less often says little about labels: almost every row would look doubtful."""
_FEATURES = 50_000


def contradictions(corpus: Corpus, settings: Settings) -> Finding:
    """Value: share of the judgements that lie on a cycle. Judgements of different annotators count like any others."""
    limit = settings.limit("contradictions")
    judged = [e for e in corpus.examples if e.kind in ("preference", "unpaired")]
    if not judged:
        return Finding(check="contradictions", limit=limit, measured="not measurable: nothing is judged")
    opposite = Faults(what="the same pair, or completion, is judged the other way elsewhere", show=settings.show)
    cyclic = Faults(what="preferences of a prompt that go round in a circle", show=settings.show)
    against, circle = _two_ways(judged), _in_cycle([e for e in judged if e.pair is not None])
    for example in judged:
        if example.place in against:
            opposite.add(f"{example.place} ≠ {against[example.place]}")
        elif example.place in circle:
            cyclic.add(example.place)
    value = share(opposite.count + cyclic.count, len(judged))
    return Finding(
        check="contradictions",
        limit=limit,
        value=value,
        measured=f"{opposite.count:,} of {len(judged):,} judgements are contradicted, {cyclic.count:,} go in a circle",
        advice="decide these again, or drop both sides: together they teach nothing but noise",
        figures={"judgements": len(judged), "opposite": opposite.count, "cyclic": cyclic.count},
        faults=[opposite, cyclic],
    )


def _two_ways(judged: Sequence[Example]) -> dict[str, str]:
    """place of a row -> place of the first row that says the opposite."""
    first: dict[tuple[object, ...], str] = {}
    for example in judged:
        first.setdefault(_judgement(example), example.place)
    out = {}
    for example in judged:
        key, *texts = _judgement(example)
        other = (key, *reversed(texts)) if example.labels is None else (key, texts[0], not texts[1])
        if other in first and other != (key, *texts):
            out[example.place] = first[other]
    return out


def _judgement(example: Example) -> tuple[object, ...]:
    texts = tuple(map(normal, example.completions))
    return (example.key, *texts) if example.labels is None else (example.key, texts[0], example.labels[0])


def _in_cycle(pairs: Sequence[Example]) -> set[str]:
    """Places of the pairs whose edge lies inside a strongly connected component."""
    of_prompt: dict[int, list[Example]] = defaultdict(list)
    for example in pairs:
        of_prompt[example.key].append(example)
    tangled = [rows for rows in of_prompt.values() if len(rows) > 1]
    nodes: dict[tuple[int, str], int] = {}
    edges = []
    for example in (e for rows in tangled for e in rows):
        better, worse = (nodes.setdefault((example.key, normal(text)), len(nodes)) for text in example.completions)
        edges.append((better, worse, example.place))
    if not edges:
        return set()
    sparse, graph = needed("scipy.sparse", "contradictions"), needed("scipy.sparse.csgraph", "contradictions")
    starts, ends = [better for better, _, _ in edges], [worse for _, worse, _ in edges]
    matrix = sparse.coo_matrix((np.ones(len(edges)), (starts, ends)), shape=(len(nodes), len(nodes)))
    _, component = graph.connected_components(matrix, directed=True, connection="strong")
    return {place for better, worse, place in edges if better != worse and component[better] == component[worse]}


# ---------------------------------------------------------------------- confident learning


def label_noise(corpus: Corpus, settings: Settings) -> Finding:
    """Value: estimated share of wrong labels, off-diagonal mass of the confident joint."""
    limit = settings.limit("label_noise")
    pairs = [e for e in corpus.examples if e.pair is not None]
    labelled = [e for e in corpus.examples if e.labels is not None]
    rows = _sample(max(pairs, labelled, key=len))
    prompts = len({e.key for e in rows})
    enough = len(rows) >= _LEAST_ROWS and prompts >= _FOLDS
    if not enough or (rows[0].labels is not None and len({e.labels for e in rows}) < 2):
        why = f"{len(rows):,} judgements of {prompts:,} prompts" if not enough else "all labels are the same"
        return Finding(check="label_noise", limit=limit, measured=f"not measurable: {why}")
    good, probability = _pair_model(rows) if rows[0].labels is None else _label_model(rows)
    accuracy = _balanced_accuracy(good, probability)
    figures = {"rows": len(rows), "accuracy": accuracy}
    if accuracy < _LEAST_ACCURACY:
        return Finding(
            check="label_noise",
            limit=limit,
            measured=f"not measurable: a model on words is right {accuracy:.2f} of the time, too seldom to judge",
            figures=figures,
        )
    estimate, doubtful = confident_noise(good, probability)
    fault = Faults(what="labels that the model doubts, the surest first", show=settings.show)
    doubt = np.where(good, 1 - probability, probability)
    for i in sorted(np.flatnonzero(doubtful[: len(rows)]).tolist(), key=lambda i: (-doubt[i], i)):
        fault.add(f"{rows[i].place} ({doubt[i]:.2f})")
    return Finding(
        check="label_noise",
        limit=limit,
        value=estimate,
        measured=f"about {percent(estimate)} of labels are wrong, by a model on words that is right {accuracy:.2f} of "
        f"the time; it doubts {fault.count:,} of {len(rows):,}",
        advice="read the rows below first; then drop them, or train with model.label_smoothing or the robust loss",
        figures={**figures, "doubtful": fault.count},
        faults=[fault],
    )


def _sample(rows: Sequence[Example]) -> list[Example]:
    """At most `_MOST_ROWS` rows, spread evenly."""
    stride = len(rows) / _MOST_ROWS
    return list(rows) if stride <= 1 else [rows[int(i * stride)] for i in range(_MOST_ROWS)]


def _pair_model(rows: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """(labels, P(label 1)) of each pair as it stands, then of each pair turned round. [2N] both.

    The model is Bradley-Terry: linear in the difference of the two completions, without a bias, so turning a pair round
    turns its probability round.
    """
    texts = _features([text for e in rows for text in e.completions])
    differences = texts[0::2] - texts[1::2]
    sparse = needed("scipy.sparse", "label_noise")
    probability = np.zeros(len(rows))
    for train, test in _folds(rows):
        both = sparse.vstack([differences[train], -differences[train]])
        labels = np.repeat([1, 0], len(train))
        probability[test] = _fit(both, labels, bias=False).predict_proba(differences[test])[:, 1]
    good = np.repeat([True, False], len(rows))
    return good, np.concatenate([probability, 1 - probability])


def _label_model(rows: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """(labels, P(good)) of each labelled completion. [N] both."""
    texts = _features([e.completions[0] for e in rows])
    good = np.array([bool(e.labels and e.labels[0]) for e in rows])
    probability = np.full(len(rows), good.mean())
    for train, test in _folds(rows):
        if good[train].any() and not good[train].all():
            probability[test] = _fit(texts[train], good[train], bias=True).predict_proba(texts[test])[:, 1]
    return good, probability


def _features(texts: Sequence[str]) -> np.ndarray:
    """[texts, words] tf-idf of words and pairs of words."""
    made = needed("sklearn.feature_extraction.text", "label_noise").TfidfVectorizer(
        ngram_range=(1, 2), max_features=_FEATURES, sublinear_tf=True, token_pattern=r"(?u)\w+|[^\w\s]"
    )
    matrix: np.ndarray = made.fit_transform(texts)  # sparse, with an array's arithmetic and indexing
    return matrix


def _folds(rows: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) positions; no prompt is in both."""
    split = needed("sklearn.model_selection", "label_noise").GroupKFold(n_splits=_FOLDS)
    return list(split.split(np.zeros(len(rows)), groups=[e.key for e in rows]))


def _fit(features: np.ndarray, labels: np.ndarray, *, bias: bool) -> Any:
    model = needed("sklearn.linear_model", "label_noise").LogisticRegression(fit_intercept=bias, max_iter=300)
    return model.fit(features, labels)


def _balanced_accuracy(good: np.ndarray, probability: np.ndarray) -> float:
    """Mean over both labels of the share that the model tells; undecided rows count half."""
    right = np.where(probability == 0.5, 0.5, (probability > 0.5) == good)
    return float((right[good].mean() + right[~good].mean()) / 2)


def confident_noise(good: np.ndarray, probability: np.ndarray) -> tuple[float, np.ndarray]:
    """(estimated share of wrong labels, [N] bool which rows are off the diagonal) of a binary confident joint.

    Args:
        good: [N] bool the given labels; both occur.
        probability: [N] P(label is true) from a model that has not seen the row.
    """
    threshold_good, threshold_bad = probability[good].mean(), (1 - probability[~good]).mean()
    may_be_good, may_be_bad = probability >= threshold_good, 1 - probability >= threshold_bad
    # Where both labels clear their bar, the more probable one counts.
    says_good = may_be_good & (~may_be_bad | (probability >= 0.5))
    says_bad = may_be_bad & ~says_good
    off = np.where(good, says_bad, says_good)
    noise = 0.0
    for label in (True, False):
        of_label = good == label
        counted = int((says_good | says_bad)[of_label].sum())
        # Each label's row of the joint is scaled to the rows that have it.
        noise += share(float(off[of_label].sum()), counted) * of_label.mean()
    return float(noise), off
