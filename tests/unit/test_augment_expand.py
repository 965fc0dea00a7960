"""Paraphrased prompts: what is inside a cluster, what is new, what keeps its facts, and what is written."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, BertTokenizer

from alignment.augmentation.clusters import Clusters, pieces, similarity
from alignment.augmentation.embedding import Lsa, SentenceModel, unit
from alignment.augmentation.expansion import ExpansionConfig, expand, rule_paraphraser
from alignment.augmentation.generation import Generator
from alignment.augmentation.paraphrase import Answer, ByModel, Candidate, by_rule, cleaned_up, same_facts, same_kind
from alignment.augmentation.rows import Rows, read_rows
from alignment.cli import main
from alignment.errors import UserError
from alignment.ready import ready
from alignment.rollout import SamplingConfig
from alignment.tiny import tiny_tokenizer
from datamodules import PromptData
from tests.unit.test_augment import lines, written

SHOP = ["price", "warranty", "colour", "weight"]
SUMS = ["3 and 14", "15 and 9", "26 and 5", "35 and 8"]
PROMPTS = [f"What is the {thing} of the lamp in your shop?" for thing in SHOP]
PROMPTS += [f"Add the numbers {pair}, then name their sum." for pair in SUMS]


def rows_of(tmp_path: Path, rows: Sequence[Any] | None = None) -> Rows:
    asked = [{"prompt": text, "answer": str(i)} for i, text in enumerate(PROMPTS)] if rows is None else rows
    return read_rows(str(written(tmp_path / "rows.jsonl", asked)), prompts_first=True)


# ---------------------------------------------------------------------- clusters


def test_inside_by_hand() -> None:
    """Two members at (1, 0) and (0.6, 0.8): the centre is (0.8, 0.4), both are sqrt(0.04 + 0.16) = 0.4472 from it; the
    other cluster is their mirror image."""
    vectors = np.array([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0], [-0.6, -0.8]])
    clusters = Clusters(vectors, count=2, quantile=0.5, seed=0)
    right, left = clusters.of[0], clusters.of[2]
    assert clusters.of.tolist() == [right, right, left, left]
    assert clusters.centres[right] == pytest.approx([0.8, 0.4])
    assert clusters.radius == pytest.approx([0.2**0.5, 0.2**0.5])
    tried = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-1.0, 0.0], [-1.0, 0.0]])
    # On the rim; 0.2 away; 1 away; of the other cluster, asked for this one and for its own.
    assert clusters.inside(tried, [right, right, right, right, left]).tolist() == [True, True, False, False, True]
    assert clusters.distance(tried[1:3], [right, right]) == pytest.approx([0.2, 1.0])


def test_the_radius_is_the_quantile_of_the_clusters_own_distances() -> None:
    """Three members on a line at 0, 0 and 3: centre 1, distances 1, 1, 2; the median is 1, so the outermost is out."""
    vectors = np.array([[0.0], [0.0], [3.0]])
    clusters = Clusters(vectors, count=1, quantile=0.5, seed=0)
    assert clusters.radius == pytest.approx([1.0])
    assert clusters.inside(vectors, [0, 0, 0]).tolist() == [True, True, False]


def test_how_many_clusters() -> None:
    """sqrt(50 / 2) = 5; never more than there are different vectors."""
    vectors = unit(np.stack([np.cos(np.arange(50.0)), np.sin(np.arange(50.0))], axis=1))
    assert len(Clusters(vectors, count=None, quantile=0.9, seed=0).centres) == 5
    assert len(Clusters(np.repeat(vectors[:2], 25, axis=0), count=None, quantile=0.9, seed=0).centres) == 2


def test_nearly_the_same_by_hand() -> None:
    """abcdef is abcde, bcdef; abcdeg is abcde, bcdeg: one of three pieces is common."""
    assert pieces("abcdef") == {"abcde", "bcdef"}
    assert similarity(pieces("abcdef"), pieces("abcdeg")) == pytest.approx(1 / 3)
    assert similarity(pieces("Who  is it?"), pieces("who is IT?")) == 1.0
    assert pieces("Hi") == {"hi"}


# ---------------------------------------------------------------------- embedding


def test_lsa_gives_lengths_of_one_and_keeps_topics_apart() -> None:
    embed = Lsa(PROMPTS, seed=0)
    vectors = embed(PROMPTS)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(8))
    # The two topics share no word but "the", so the nearest other prompt is of the same topic.
    cosines = vectors @ vectors.T - 2 * np.eye(8)
    assert all(int(cosines[i].argmax()) // 4 == i // 4 for i in range(8))
    assert embed(["zzz"]).tolist() == [[0.0] * vectors.shape[1]]


def test_lsa_needs_words() -> None:
    with pytest.raises(UserError, match="hold no words to tell them apart by; name a model with --embedding"):
        Lsa(["?!", "..."], seed=0)
    with pytest.raises(UserError, match="2 prompts with 1 different words cannot be clustered"):
        Lsa(["word", "word"], seed=0)


def save_sentence_model(folder: Path) -> Path:
    """A small BERT with random weights: a folder that sentence-transformers reads with mean pooling."""
    folder.mkdir(parents=True)
    words = sorted({word for text in PROMPTS for word in text.lower().replace("?", "").replace(",", "").split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


def test_a_sentence_model_is_its_mean_over_tokens(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    sentence_model = save_sentence_model(tmp_path / "bert")
    vectors = SentenceModel(str(sentence_model))(PROMPTS[:2])
    tokenizer = BertTokenizer.from_pretrained(sentence_model)
    model = AutoModel.from_pretrained(sentence_model).eval()
    for text, vector in zip(PROMPTS[:2], vectors, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0).double()
        assert vector == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)


def test_without_the_package_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"pip install 'lightning-alignment\[rewards\]'; or take --embedding lsa"):
        SentenceModel(str(tmp_path))


# ---------------------------------------------------------------------- paraphrases


def test_rules_keep_every_fact_and_are_all_different() -> None:
    text = "What is 2.50 plus 3 in Rome?"
    made = by_rule(text, 20, seed=0)
    assert made[0] == Candidate("What's 2.50 plus 3 in Rome?", "rule:phrase")
    assert len({candidate.text for candidate in made}) == len(made) > 5
    assert text not in [candidate.text for candidate in made]
    assert all(same_facts(text, candidate.text) for candidate in made)
    assert by_rule(text, 3, seed=0) == made[:3]


def test_rules_for_a_request() -> None:
    (first, *_) = by_rule("Describe the moon.", 6, seed=0)
    assert first == Candidate("Give a description of the moon.", "rule:phrase")


FACTS = [
    ("Add 2 and 3.", "What is 2 plus 3?", True),
    ("Add 2 and 3.", "What is 2 plus 4?", False),
    ("Add 2 and 3.", "Add 2 and 3 and 3.", False),
    ("What does the Fenello torch cost?", "How expensive is the Fenello torch?", True),
    ("What does the Fenello torch cost?", "How expensive is the torch?", False),
    ('Correct "He go home".', 'Mend the sentence "He go home".', True),
    ('Correct "He go home".', 'Mend the sentence "He goes home".', False),
    ("It's the dog's bowl, isn't it?", "Is this the bowl of the dog?", True),
]


@pytest.mark.parametrize(("before", "after", "kept"), FACTS)
def test_facts(before: str, after: str, kept: bool) -> None:
    assert same_facts(before, after) is kept


def test_what_asks_goes_on_asking() -> None:
    """What a small model wrote for the second: an answer, which holds the same name."""
    assert same_kind("What does it cost?", "How much is it?")
    assert not same_kind("What is the capital of Indonesia?", "In other words, the capital of Indonesia is an island.")
    assert same_kind("Name its price.", "What does it cost?")
    assert same_kind('Say "How much?"', "What about “How much?”")
    assert not same_kind("Describe rain.", "Rain is water.\n\nIt falls.")
    assert same_kind("Here is a text.\n\nMend it.", "Mend this.\n \nA text.")
    assert same_kind("\u4ef7\u683c\u662f\u591a\u5c11\uff1f", "\u591a\u5c11\u94b1\uff1f")


def test_a_reply_is_cleaned_up() -> None:
    assert cleaned_up(' "How are you?"\n') == "How are you?"
    assert cleaned_up("Here is the rewritten request:\n\n“Tell me.”") == "Tell me."
    assert cleaned_up("Say: hello") == "Say: hello"


class Scripted:
    """A generator with fixed answers."""

    def answers(
        self, prompts: Mapping[int, str], count: int, sampling: SamplingConfig, *, seed: int
    ) -> dict[int, list[Answer]]:
        self.asked = dict(prompts)
        kept = [Answer('"How much is lamp 7?"', False), Answer("How much is lamp 8?", False), Answer("What does", True)]
        return {number: [*kept, Answer("How much is lamp 7?", False), Answer(" ", False)] for number in prompts}


def test_what_a_model_wrote_is_checked() -> None:
    """Quotation marks go; another number, a cut reply, a repeated one and an empty one are left out."""
    generator = Scripted()
    made = ByModel(generator, SamplingConfig(), seed=0)({4: "What does lamp 7 cost?"}, 5)
    assert made == {4: [Candidate("How much is lamp 7?", "model")]}
    assert generator.asked[4].endswith("\n\nWhat does lamp 7 cost?")


def test_answers_of_a_model_depend_on_their_own_prompt_alone() -> None:
    generator = Generator(ready("tiny", policy={}))
    sampling = SamplingConfig(max_tokens=6)
    both = generator.answers({1: "Hello.", 2: "What is 2 + 2?"}, 3, sampling, seed=5)
    alone = generator.answers({2: "What is 2 + 2?"}, 3, sampling, seed=5)
    assert both[2] == alone[2]
    assert [len(both[number]) for number in (1, 2)] == [3, 3]
    assert generator.answers({2: "What is 2 + 2?"}, 3, sampling, seed=6)[2] != alone[2]
    # The tiny model has 2048 positions, a byte is at most a token: this one has no room.
    assert generator.answers({3: "é" * 2048}, 1, sampling, seed=5) == {}


# ---------------------------------------------------------------------- expansion


def test_new_prompts_keep_their_answers_and_are_read(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [{"prompt": text, "answer": str(i)} for i, text in enumerate(PROMPTS)])
    out = tmp_path / "out.jsonl"
    words = ["--mode=expand", "--share=0.5", "--clusters=2", "--quantile=1", "--no_tracking"]
    assert main(["data", "augment", str(source), str(out), *words]) == 0
    rows = lines(out)
    added = [row for row in rows if row["augmented"]]
    assert len(added) == 4  # half of 8
    assert [row["prompt"] for row in rows if not row["augmented"]] == PROMPTS
    for before, row in pairwise(rows):
        if row["augmented"]:
            assert row["answer"] == before["answer"] == str(row["source_row"] - 1)
            assert row["expansion"].startswith("rule:")
            assert row["prompt"] != PROMPTS[row["source_row"] - 1]
    data = PromptData(str(out), tokenizer=tiny_tokenizer(), cache_dir=None, val_fraction=0.0)
    assert (len(data.groups("train")), data.report.skipped) == (12, 0)
    first = out.read_bytes()
    assert main(["data", "augment", str(source), str(out), *words, "--force"]) == 0
    assert out.read_bytes() == first


def test_what_is_refused_is_counted(tmp_path: Path) -> None:
    """For each prompt one that is there but for its case, one that is nearly there, and one of the other topic."""
    rows = rows_of(tmp_path)

    def script(texts: Mapping[int, str], count: int) -> dict[int, list[Candidate]]:
        tried = {n: [text.upper(), text + "!", PROMPTS[(n + 3) % 8]] for n, text in texts.items()}
        return {n: [Candidate(text, "model") for text in made] for n, made in tried.items()}

    with pytest.raises(UserError) as error:
        expand(rows, ExpansionConfig(clusters=2, quantile=1.0), script)
    told = str(error.value)
    for reason in ("there already", "nearly there", "outside the cluster"):
        assert any(f"8 candidates {words}{reason}" in told for words in ("that are ", "")), told


def test_the_first_good_candidate_is_kept(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)

    def script(texts: Mapping[int, str], count: int) -> dict[int, list[Candidate]]:
        tried = {n: [text, f"Well now. {text} Thanks."] for n, text in texts.items()}
        return {n: [Candidate(text, "model") for text in made] for n, made in tried.items()}

    made = expand(rows, ExpansionConfig(share=1.0, clusters=2, quantile=1.0), script)
    assert made.counts["new prompts"] == made.counts["by model"] == 8
    assert made.counts["candidates that are there already"] == 8
    assert made.counts["clusters"] == 2
    assert [row["prompt"] for row in made.rows[1::2]] == [f"Well now. {text} Thanks." for text in PROMPTS]


def test_all_comparisons_of_a_prompt_come_along(tmp_path: Path) -> None:
    pairs = [{"prompt": text, "chosen": f"good {i}", "rejected": f"bad {i}"} for text in PROMPTS for i in range(3)]
    rows = read_rows(str(written(tmp_path / "rows.jsonl", pairs)))
    made = expand(rows, ExpansionConfig(share=0.25, clusters=2, quantile=1.0), rule_paraphraser(0))
    assert (made.counts["prompts"], made.counts["new prompts"], made.counts["new rows"]) == (8, 2, 6)
    added = [row for row in made.rows if row["augmented"]]
    assert [row["chosen"] for row in added] == ["good 0", "good 1", "good 2"] * 2
    assert len({row["prompt"] for row in added}) == 2


def test_an_input_stays(tmp_path: Path) -> None:
    """The instruction is rewritten, the data below it are not."""
    asked = [{"instruction": f"Describe thing {i}.", "input": f"Data {i}: 5\n", "output": "Done."} for i in range(8)]
    rows = read_rows(str(written(tmp_path / "rows.jsonl", asked)))
    made = expand(rows, ExpansionConfig(share=1.0, clusters=1, quantile=1.0, similarity=1.0), rule_paraphraser(0))
    added = [row for row in made.rows if row["augmented"]]
    assert added
    for row in added:
        own = asked[row["source_row"] - 1]
        assert (row["input"], row["output"]) == (own["input"], own["output"])
        assert row["instruction"] in [candidate.text for candidate in by_rule(own["instruction"], 6, seed=0)]


def test_added_rows_are_no_sources(tmp_path: Path) -> None:
    marks = {"expansion": "rule:opening", "source_row": 1}
    asked = [{"prompt": text, "augmented": i > 0, **marks} for i, text in enumerate(PROMPTS)]
    made = expand(rows_of(tmp_path, asked), ExpansionConfig(share=1.0, clusters=1, quantile=1.0), rule_paraphraser(0))
    assert made.counts["new prompts"] == 1


MISTAKES: list[tuple[list[str], str]] = [
    (["--share=0"], "--share is 0.0; it must be above 0 and at most 1"),
    (["--candidates=0"], "--candidates is 0; at least 1 paraphrase must be tried"),
    (["--clusters=0"], "--clusters is 0; there is at least 1"),
    (["--embedding=./nowhere"], "no model folder './nowhere' for --embedding"),
    (["--paraphrase=./nowhere"], "no model folder './nowhere'"),
    (["--sampling.temperature", "1"], "sampling is for a model that paraphrases: name one with --paraphrase"),
    (["--max_rows=1"], "has 1 different prompts; clusters need at least 2"),
    (["--rejected=kept"], "--rejected belongs to --mode adversarial, and this is --mode expand"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0].startswith("--embedding"):
        pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", [{"prompt": text} for text in PROMPTS])
    assert main(["data", "augment", "rows.jsonl", "out.jsonl", "--mode=expand", "--no_tracking", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()
