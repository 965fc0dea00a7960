"""Sequence classifiers as rewards: one row's score, whatever surrounds it (C25); ensembles; what cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from alignment.batches import GroupBatch
from alignment.checkpoint import SafeCheckpointIO
from alignment.errors import UserError
from alignment.reward_export import export_reward
from alignment.rewards import RewardSuite, Samples, SequenceClassifier, Texts
from alignment.tiny import tiny_config
from modules import RewardModel
from tests.toys import OPTIM, TINY, FixedData, groups, trainer

EOS = 3
PROMPTS = [[1, 2, 40], [1, 2, 41, 42, 43, 44, 45]] * 3
COMPLETIONS = [[50, EOS], [51, 52, 53, EOS], [54, 0], [EOS], [55, 56, 57, 58, 59], [0, 0, 0]]


def classifier(folder: Path, labels: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A saved Llama with a random head for `labels` outputs."""
    config = tiny_config()
    config.num_labels = labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config).eval()
        torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def alone(model: PreTrainedModel, row: list[int]) -> Tensor:
    """[outputs] of one row by itself: no padding, the last position."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([row])).last_hidden_state[0, -1]
        return model.score(hidden)


def call(reward: SequenceClassifier) -> list[float | None]:
    texts = [""] * len(PROMPTS)
    return reward(texts, texts, PROMPTS, COMPLETIONS)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("single")
    return folder, classifier(folder, 1, 0, tiny_tokenizer)


@pytest.fixture(scope="module")
def triple(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("triple")
    return folder, classifier(folder, 3, 1, tiny_tokenizer)


@pytest.mark.parametrize("batch_tokens", [8192, 16, 1])
@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None])
def test_a_score_is_that_of_the_row_alone(batch_tokens: int, pad: str | None, tmp_path: Path, tiny_tokenizer) -> None:
    """Also for rows that end with the padding token, with padding that is the end of text, and without any."""
    model = classifier(tmp_path, 1, 0, tiny_tokenizer)
    tiny = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tiny.pad_token = pad
    tiny.save_pretrained(tmp_path)
    expected = [float(alone(model, p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    found = call(SequenceClassifier(str(tmp_path), batch_tokens=batch_tokens))
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_exported_reward_model_scores_as_in_training(tmp_path: Path) -> None:
    module = RewardModel(policy=TINY, optim=OPTIM, members=2, aggregation="min")
    t = trainer(tmp_path, max_steps=2, limit_val_batches=0, plugins=[SafeCheckpointIO()])
    t.fit(module, datamodule=FixedData(groups(16, 2)))
    t.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="is a checkpoint"):
        SequenceClassifier(str(tmp_path / "checkpoint"))
    folder = export_reward(tmp_path / "checkpoint", tmp_path / "exported")
    batch = GroupBatch.from_groups(groups(4, 2))
    spec = {
        "reward": "SequenceClassifier",
        "args": {"name": str(folder), "label": "members", "aggregation": "min"},
        "in_process": True,
    }

    class Rollout:
        truncated = torch.zeros(8, dtype=torch.bool)

    Rollout.batch = batch
    samples = Samples.of(Rollout(), Texts([""] * 4, [""] * 8))
    found = RewardSuite({"learned": spec}).submit_samples(samples).collect()
    with torch.no_grad():
        expected = module.rewards(batch)
    torch.testing.assert_close(found.values[:, 0], expected, atol=1e-5, rtol=0)


def test_members_of_one_model_and_of_several(single, triple) -> None:
    """Mean, minimum, and mean minus .5 population variance of all outputs, worked out from rows alone."""
    rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    outputs = torch.stack([torch.cat([alone(triple[1], row), alone(single[1], row)]) for row in rows])
    names = [str(triple[0]), str(single[0])]
    mean = outputs.mean(dim=1)
    variance = ((outputs - mean[:, None]) ** 2).mean(dim=1)
    for how, expected in {"mean": mean, "min": outputs.amin(dim=1), "uwo": mean - 0.5 * variance}.items():
        found = call(SequenceClassifier(names, label="members", aggregation=how))  # type: ignore[arg-type]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_label_is_a_probability(triple) -> None:
    rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = [float(alone(triple[1], row).softmax(0)[2]) for row in rows]
    for label in (2, "LABEL_2"):
        assert call(SequenceClassifier(str(triple[0]), label=label)) == pytest.approx(expected, abs=1e-5)


def test_reading_text(single, tiny_tokenizer) -> None:
    """Prompt and completion in one text with one BOS, or the completion alone; nothing to read, no score."""
    folder, model = single
    expected = float(alone(model, tiny_tokenizer("<bos>ask reply")["input_ids"]))
    reward = SequenceClassifier(str(folder), reads="text")
    assert reward(["<bos>ask", "<bos>ask"], [" reply", ""]) == [pytest.approx(expected, abs=1e-5), None]
    expected = float(alone(model, tiny_tokenizer(" reply")["input_ids"]))
    assert SequenceClassifier(str(folder), reads="completion")(["x"], [" reply"]) == [pytest.approx(expected, abs=1e-5)]


def test_a_tokenizer_that_adds_a_bos_does_not_add_a_second(single, tmp_path: Path, tiny_tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    model = classifier(tmp_path, 1, 0, tiny_tokenizer)
    adding = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    adding.save_pretrained(tmp_path)
    reward = SequenceClassifier(str(tmp_path), reads="text")
    expected = float(alone(model, tiny_tokenizer("<bos>ask reply")["input_ids"]))
    assert reward(["<bos>ask", "ask"], [" reply"] * 2) == pytest.approx([expected] * 2, abs=1e-5)


def test_an_encoder(tmp_path: Path, tiny_tokenizer) -> None:
    """Any sequence classifier, with a position limit of its own: the beginning of a long text is dropped."""
    config = BertConfig(
        vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.max_position_embeddings, config.num_labels = 12, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ids = tiny_tokenizer("many words here, more than it can read")["input_ids"]
    assert len(ids) > 12
    with torch.no_grad():
        expected = [float(model(torch.tensor([row])).logits.softmax(1)[0, 1]) for row in (ids[-12:], [70])]
    reward = SequenceClassifier(str(tmp_path), reads="completion", label=1)
    found = reward(["", ""], ["many words here, more than it can read", tiny_tokenizer.decode([70])])
    assert found == pytest.approx(expected, abs=1e-5)


def test_no_tokens_no_score(single) -> None:
    assert SequenceClassifier(str(single[0]))([""] * 2, [""] * 2, [[1], [1]], [[], []]) == [None, None]


def test_long_rows_lose_their_beginning(single) -> None:
    expected = float(alone(single[1], [7, 8, 9]))
    found = SequenceClassifier(str(single[0]), max_tokens=3)([""], [""], [[5, 6]], [[7, 8, 9]])
    assert found == [pytest.approx(expected, abs=1e-5)]


def test_what_cannot_be_used(single, triple, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no sequence classifier: it lacks score\.weight"):
        SequenceClassifier(str(tiny_model_dir))
    with pytest.raises(
        UserError, match="has 3 outputs; set label to one of 'LABEL_0', 'LABEL_1', 'LABEL_2', or to members"
    ):
        SequenceClassifier(str(triple[0]))
    with pytest.raises(UserError, match="has no label 'GOOD'"):
        SequenceClassifier(str(triple[0]), label="GOOD")
    with pytest.raises(UserError, match="use ids, text or completion"):
        SequenceClassifier(str(single[0]), reads="chat")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no model is named"):
        SequenceClassifier([])
    with pytest.raises(ValueError, match="token 9999 is beyond the 512 of reward model"):
        SequenceClassifier(str(single[0]))([""], [""], [[9999]], [[1]])
    with pytest.raises(ValueError, match="no token ids"):
        SequenceClassifier(str(single[0]))([""], [""])
