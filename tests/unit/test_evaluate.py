"""`alignment evaluate`: every number by hand or by the model itself, and where results go."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.chat import ChatEncoder
from alignment.cli import main
from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject, by_category, mean_interval, share_interval
from alignment.evaluation.command import TASKS, build
from alignment.evaluation.harness import _result
from alignment.evaluation.likelihood import MultipleChoice, Perplexity, PreferenceAccuracy
from alignment.evaluation.replies import Diversity, Replies

REPOSITORY = Path(__file__).resolve().parents[2]
FIT = ["--trainer.max_steps=1", "--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4"]
FIT += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject("tiny", device="cpu")


def rows(path: str, values: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in values))
    return path


@torch.no_grad()
def logps(subject: Subject, prompt: list[int], completion: list[int]) -> list[float]:
    """Of each token of a completion, from a plain forward pass."""
    found = subject.policy.model(torch.tensor([prompt + completion])).logits.double().log_softmax(-1)[0]
    return [float(found[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


# ------------------------------------------------------------------------------------------------ numbers


def test_intervals() -> None:
    """Wilson's for 8 of 10, from his formula by hand; of no rows none. A mean's: 1, 2, 3 have deviation 1."""
    assert share_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert all(map(math.isnan, share_interval(0, 0)))
    half = 1.959964 / math.sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half))
    assert all(map(math.isnan, mean_interval([1.0])))


def test_categories_count_alike() -> None:
    """Three of four in one, one of one in the other: means .75 and 1, their mean .875 and not 4 of 5."""
    metrics, table = by_category([1, 1, 1, 0, 1, 0], ["a", "a", "a", "a", "b", None])
    assert metrics == {"a/accuracy": 0.75, "b/accuracy": 1.0, "categories/accuracy": 0.875}
    assert [(row["category"], row["rows"]) for row in table] == [("a", 4), ("b", 1)]
    assert by_category([1], [None]) == ({}, [])


# ------------------------------------------------------------------------------------------------ log-probs


def test_perplexity(tiny: Subject, workdir: Path) -> None:
    """Every completion token counts the same, long rows more."""
    values = [{"prompt": "hi", "completion": "there"}, {"prompt": "how are you", "completion": "I am well, thank you."}]
    path = rows("rows.jsonl", values)
    encoder = ChatEncoder(tokenizer=tiny.policy.tokenizer)
    found = [logps(tiny, encoder.prompt(v["prompt"]), encoder.completion(v["completion"])) for v in values]
    loss = -sum(map(sum, found)) / sum(map(len, found))
    result = Perplexity(path).run(tiny)
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.metrics["tokens"] == sum(map(len, found))


@pytest.mark.parametrize("normalise", ["tokens", "none"])
def test_multiple_choice(tiny: Subject, workdir: Path, normalise: Any) -> None:
    """Answers as number, letter and text; the likeliest choice is made the right one of two questions in three."""
    encoder = ChatEncoder(tokenizer=tiny.policy.tokenizer)
    choices = ["yes", "a much longer answer than that", "no no"]
    best = []
    for question in ("one?", "two?", "three?"):
        found = [logps(tiny, encoder.prompt(question), encoder.completion(c, end=False)) for c in choices]
        scores = [sum(f) / (len(f) if normalise == "tokens" else 1) for f in found]
        best.append(scores.index(max(scores)))
    path = rows("questions.jsonl", [
        {"question": "one?", "choices": choices, "answer": best[0], "category": "a"},
        {"question": "two?", "choices": choices, "answer": "ABC"[best[1]], "category": "a"},
        {"question": "three?", "choices": choices, "answer": choices[(best[2] + 1) % 3], "category": "b"},
    ])  # fmt: skip
    result = MultipleChoice(path, normalise=normalise).run(tiny)
    assert result.metrics == {
        "accuracy": 2 / 3, "a/accuracy": 1.0, "b/accuracy": 0.0, "categories/accuracy": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "choices": ["a"], "answer": 0},
        {"question": "q", "choices": ["a", "b"], "answer": 2},
        {"question": "q", "choices": ["a", "b"], "answer": "c"},
        {"question": "q", "choices": ["a", "b"], "answer": True},
        {"choices": ["a", "b"], "answer": 0},
    ],
)
def test_questions_that_are_none(tiny: Subject, workdir: Path, row: dict[str, Any]) -> None:
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    with pytest.raises(UserError, match=r"questions.jsonl .*2: (a question needs|answer)"):
        MultipleChoice(rows("questions.jsonl", [good, row])).run(tiny)


def test_preferences_of_a_policy(tiny: Subject, workdir: Path) -> None:
    values = [
        {"prompt": f"say {i}", "chosen": text, "rejected": other, "subset": "ab"[i % 2]}
        for i, (text, other) in enumerate([("yes", "no"), ("good day to you", "go away now"), ("1", "2 3 4")])
    ]
    encoder = ChatEncoder(tokenizer=tiny.policy.tokenizer)
    margins = []
    for v in values:
        scores = [logps(tiny, encoder.prompt(v["prompt"]), encoder.completion(v[s])) for s in ("chosen", "rejected")]
        margins.append(sum(scores[0]) / len(scores[0]) - sum(scores[1]) / len(scores[1]))
    path = rows("pairs.jsonl", values)
    result = PreferenceAccuracy(path).run(tiny)
    assert result.metrics["accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert result.metrics["margin"] == pytest.approx(sum(margins) / 3, abs=1e-5)
    assert [row["rows"] for row in result.table] == [2, 1]
    itself = PreferenceAccuracy(path, reference="tiny").run(tiny)  # no margin anywhere: ties
    assert (itself.metrics["accuracy"], itself.metrics["margin"]) == (0.5, 0.0)


def test_preferences_of_a_reward_model(workdir: Path) -> None:
    """A checkpoint and its export say the same; a policy's task refuses it."""
    assert main(["fit", "-c", str(REPOSITORY / "configs" / "reward_model.yaml"), *FIT]) == 0
    assert main(["export", "last", "reward"]) == 0
    path = rows("pairs.jsonl", [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(4)])
    found = [PreferenceAccuracy(path).run(Subject(name, device="cpu")).metrics for name in ("last", "reward")]
    assert found[0] == pytest.approx(found[1])
    assert found[0]["margin"] != 0
    with pytest.raises(UserError, match="'reward' is a reward model; this task needs a policy"):
        Perplexity(path).run(Subject("reward", device="cpu"))


# ------------------------------------------------------------------------------------------------ replies

TONE = """
def size(completion):
    return float(len(completion))
def odd(completion, number):
    return None if number == 0 else float(number % 2)
"""


def test_replies_under_rewards(tiny: Subject, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers 0 to 4: one abstains, of the others two are odd; categories take part in the share."""
    Path("tone.py").write_text(TONE)
    monkeypatch.syspath_prepend(str(workdir))
    path = rows("p.jsonl", [{"prompt": f"say {i}", "number": i, "category": "ab"[i > 2]} for i in range(5)])
    rewards = {"size": {"reward": "tone.size", "in_process": True}, "odd": {"reward": "tone.odd", "in_process": True}}
    task = Replies(path, rewards, threshold={"odd": 1}, max_tokens=6, shown=2)
    result = task.run(tiny)
    assert result.metrics["odd"] == 0.5
    assert result.metrics["odd/abstained"] == pytest.approx(0.2)
    assert result.metrics["odd/share"] == 0.5
    assert (result.metrics["odd/a/share"], result.metrics["odd/b/share"]) == (0.5, 0.5)
    assert result.intervals["odd/share"] == share_interval(2, 4)
    assert 1 <= result.metrics["length"] <= 6
    assert len(result.table) == 2
    assert result.table[0]["odd"] == "abstained"
    assert result.table[0]["size"] == len(str(result.table[0]["reply"]))


def test_diversity(tiny: Subject, workdir: Path) -> None:
    path = rows("p.jsonl", [{"prompt": f"say {i}"} for i in range(3)])
    found = Diversity(path, samples=2, max_tokens=8).run(tiny).metrics
    assert 0 < found["distinct_1"] <= 1
    assert 0 <= found["self_bleu"] <= 1
    with pytest.raises(UserError, match="two or more samples"):
        Diversity(path, samples=1)


def test_lm_eval_names() -> None:
    """Means and standard errors as lm-eval writes them."""
    found = {"arc": {"acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 0.25, "alias": "arc"}}
    result = _result(found)
    assert result.metrics == {"arc/acc": 0.5, "arc/exact/strict": 0.25}
    assert result.intervals == {"arc/acc": pytest.approx((0.304, 0.696))}


# ------------------------------------------------------------------------------------------------ the command


def test_results_go_to_the_run(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient

    assert main(["fit", "-c", str(REPOSITORY / "configs" / "dpo.yaml"), *FIT]) == 0
    support = str(REPOSITORY / "configs" / "evaluate" / "support.yaml")
    Path("mine.yaml").write_text("pairs: {task: PreferenceAccuracy, path: 'world:support', split: test, max_rows: 8, "
                                 "category: aspect}\n")  # fmt: skip
    capsys.readouterr()
    assert main(["evaluate", "last", "-c", "mine.yaml", "-c", support, "--only=pairs", "--only=variety"]) == 0
    said = capsys.readouterr().out
    assert "accuracy" in said
    kept = json.loads(Path("evaluation.json").read_text())
    assert set(kept["tasks"]) == {"pairs", "variety"}
    (record,) = [json.loads(file.read_text()) for file in Path("runs").glob("*/*/run.json")]
    client = MlflowClient(f"sqlite:///{workdir.resolve()}/mlflow.db")
    run = client.get_run(record["run_id"])
    assert run.data.metrics["eval/pairs/accuracy"] == kept["tasks"]["pairs"]["metrics"]["accuracy"]
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(record["run_id"], "eval")} == {
        "eval/pairs.json", "eval/evaluation.json"
    }  # fmt: skip
    assert main(["evaluate", "tiny", "-c", "mine.yaml"]) == 0  # of no run: one of its own
    experiment = client.get_experiment_by_name("evaluation")
    assert experiment is not None
    assert [r.info.run_name for r in client.search_runs([experiment.experiment_id])] == ["tiny"]


def test_mistakes(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(text: str, *more: str) -> str:
        Path("t.yaml").write_text(text)
        assert main(["evaluate", "tiny", "-c", "t.yaml", *more]) == 2
        return capsys.readouterr().err

    assert "holds no tasks" in line("a: 3")
    assert "is not YAML" in line("{")
    assert "a: no task 'Perplexty'; did you mean 'Perplexity'?" in line("a: {task: Perplexty}")
    assert "a: MultipleChoice has no setting 'pth'; did you mean 'path'?" in line("a: {task: MultipleChoice, pth: x}")
    assert "a: MultipleChoice needs path" in line("a: {task: MultipleChoice}")
    assert "a: diversity is that of two or more" in line("a: {task: Diversity, path: x, samples: 1}")
    assert "a: no task 'my_tasks.Mine'" in line("a: {task: my_tasks.Mine}")
    assert "--only b: there are a" in line("a: {task: Diversity, path: x}", "--only=b")
    assert "there is no file or folder 'x.jsonl'" in line("a: {task: MultipleChoice, path: x.jsonl}")


def test_a_task_of_ones_own(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_tasks.py").write_text(
        "from alignment.evaluation.base import Result\n"
        "class Mine:\n"
        "    def __init__(self, value):\n        self.value = value\n"
        "    def run(self, subject):\n        return Result(metrics={'value': self.value})\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    Path("t.yaml").write_text("a: {task: my_tasks.Mine, value: 4}")
    assert main(["evaluate", "tiny", "-c", "t.yaml", "--no_tracking", "--out=out/found.json"]) == 0
    assert json.loads(Path("out/found.json").read_text())["tasks"]["a"]["metrics"] == {"value": 4}


def test_every_task_is_where_it_is_said() -> None:
    for kind in TASKS:
        warm = "alignment.rewards.support.warmth"
        judge = {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "m"}, "criteria": "Which?"}
        settings = {"path": "x", "rewards": {"warm": warm}, "tasks": ["t"], "reward": warm, "judge": judge}
        settings["harmless"] = warm
        needed = {"LmEval": ("tasks",), "Replies": ("path", "rewards"), "PassAtK": ("path", "reward")}
        needed |= {"WinRate": ("path", "judge"), "MTBench": ("judge", "path"), "Safety": ("path", "harmless")}
        given = {key: settings[key] for key in needed.get(kind, ("path",))}
        assert hasattr(build("a", {"task": kind, **given}), "run")
    assert Result(metrics={}).table == ()
