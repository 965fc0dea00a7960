"""`alignment advise`: where answers lead, what it costs by hand, and that every configuration it writes runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from alignment import advise_command
from alignment.advice import QUESTIONS, TREE, Ask, Choice, Run, decide, leaves
from alignment.advice_cost import Rates, Rows, flops, seconds
from alignment.batches import Group
from alignment.cli import main
from alignment.errors import UserError
from alignment.tiny import save_tiny

BRIEF = [
    ({"signal": "demonstrations"}, ["SFT"]),
    ({"signal": "labels"}, ["KTO"]),
    ({"signal": "pairs", "diversity": "no", "compute": "little", "length": "short"}, ["DPO"]),
    ({"signal": "pairs", "diversity": "no", "compute": "little", "length": "long"}, ["DPO"]),
    ({"signal": "pairs", "diversity": "yes", "field": "general"}, ["GeneralizedRPO"]),
    ({"signal": "pairs", "diversity": "yes", "field": "professional"}, ["GeneralizedRPO"]),
    ({"signal": "pairs", "diversity": "no", "compute": "plenty", "priority": "safety"}, ["RewardModel", "PPO"]),
    ({"signal": "pairs", "diversity": "no", "compute": "plenty", "priority": "performance"}, ["RewardModel", "PPO"]),
    ({"signal": "pairs", "diversity": "no", "compute": "plenty", "priority": "balance"}, ["RewardModel", "PPO"]),
    ({"signal": "reward", "rewards": "one"}, ["GRPO"]),
    ({"signal": "reward", "rewards": "several", "trade": "now"}, ["GDPO"]),
    ({"signal": "reward", "rewards": "several", "trade": "later"}, ["DecoupledPO"]),
    ({"signal": "reward", "rewards": "several", "trade": "opposed"}, ["MORL"]),
]
SMALL = ["--trainer.fast_dev_run=1", "--data.batch_size=2", "--data.max_rows=8", "--data.max_eval_rows=2"]


def flags(answers: dict[str, str]) -> list[str]:
    return [f"--{name}={said}" for name, said in answers.items()]


def settings(*answers: str) -> dict[str, object]:
    """Of the last run of a leaf."""
    node: Ask | Choice = TREE
    for said in answers:
        assert isinstance(node, Ask)
        node = node.then[said]
    assert isinstance(node, Choice)
    return dict(node.runs[-1].settings)


def test_every_leaf_is_where_it_is_expected() -> None:
    assert [(answers, [run.module for run in choice.runs]) for answers, choice in sorted_leaves()] == sorted(
        BRIEF, key=lambda leaf: str(sorted(leaf[0].items()))
    )


def sorted_leaves() -> list[tuple[dict[str, str], Choice]]:
    return sorted(leaves(), key=lambda leaf: str(sorted(leaf[0].items())))


def test_every_question_is_asked_with_all_its_answers() -> None:
    def nodes(node: Ask | Choice) -> Iterator[Ask]:
        if isinstance(node, Ask):
            yield node
            for below in node.then.values():
                yield from nodes(below)

    asked = list(nodes(TREE))
    assert {node.question for node in asked} == set(QUESTIONS)
    assert all(set(node.then) == set(QUESTIONS[node.question].answers) for node in asked)


def test_settings_of_the_brief() -> None:
    """Long texts: the length-normalised loss. Safety: a KL penalty with a target. Performance: an ensemble."""
    assert settings("pairs", "no", "little", "long")["loss"] == "sigmoid_norm"
    assert settings("pairs", "no", "plenty", "safety")["kl"]["target"] == 6.0  # type: ignore[index]
    assert settings("pairs", "yes", "professional") == {"domains": {"column": "domain"}}
    choice = decide({"signal": "pairs", "diversity": "no", "compute": "plenty", "priority": "performance"}.__getitem__)
    assert choice.runs[0].settings["members"] == 3


def test_pages_exist() -> None:
    assert all(Path(choice.page).is_file() for _, choice in leaves())


def test_a_wrong_answer() -> None:
    with pytest.raises(UserError, match="--signal is one of demonstrations, labels, pairs, reward; got 'x'"):
        decide(lambda name: "x")


# ------------------------------------------------------------------------------------------------ cost, by hand

DPO = Run(name="dpo", module="DPO", data="PreferenceData")
GRPO = Run(name="grpo", module="GRPO", data="PromptData", settings={"completions": 4}, batch_size=2)


def test_rows() -> None:
    """Prompts of 3 and 5 tokens; replies 2 and 4, 6 and 6: means 4 and (3 + 6) / 2, longest 5 + 12."""
    pairs = [Group(prompt=[1] * 3, completions=[[1] * 2, [1] * 4]), Group(prompt=[1] * 5, completions=[[1] * 6] * 2)]
    assert Rows.of(pairs, 99) == Rows(count=2, prompt=4, reply=4.5, longest=17)
    prompts = [Group(prompt=[1] * 3, completions=[])]
    assert Rows.of(prompts, 99) == Rows(count=1, prompt=3, reply=99, longest=102)


def test_time() -> None:
    """10 parameters. A pair of 3 + 2 x 2 tokens: 20 FLOP a token forward, three times that to train, once more for the
    reference. GRPO: 3 + 4 x 2 tokens sampled and trained on; its 2 rows are one batch of 2 steps of 40 bytes."""
    rows = Rows(count=2, prompt=3, reply=2, longest=7)
    assert flops(DPO, rows, 10, 1) == 2 * 7 * 20 * 4
    assert flops(replace(DPO, module="SFT", data="SupervisedData"), rows, 10, 1) == 2 * 5 * 20 * 3
    assert flops(replace(DPO, module="RewardModel"), rows, 10, 1) == 2 * 7 * 20 * 3
    assert flops(GRPO, rows, 10, 1) == 2 * 11 * 20 * 4
    ppo = replace(GRPO, module="PPO", settings={})
    assert flops(ppo, rows, 10, 4) == 2 * 5 * 20 * (1 + 1 + 12)
    least, most = seconds(GRPO, rows, 10, 40, Rates(flops=1760, read=80))
    assert (least, most) == pytest.approx((2 / 0.65, 2 / 0.2))  # one second of products, one of reading


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("answers", [a for a, modules in BRIEF if "PPO" not in modules], ids=str)
def test_what_is_written_runs(answers: dict[str, str], workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--reply_tokens=4"] if answers["signal"] == "reward" else []
    assert main(["advise", *flags(answers), *changed, "--device=cpu"]) == 0
    said = capsys.readouterr().out
    (file,) = Path("advised").glob("*.yaml")
    assert f"alignment fit -c {file}" in said
    assert "memory: about" in said
    assert "an epoch on this machine" in said
    more = ["--model.domains.column=aspect"] if answers.get("field") == "professional" else []  # of the built-in rows
    assert main(["fit", "-c", str(file), *SMALL, *more]) == 0


def test_a_reward_model_first(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"signal": "pairs", "diversity": "no", "compute": "plenty", "priority": "performance"}
    rows = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["advise", *flags(answers), "--data=pairs.jsonl", "--reply_tokens=4", "--device=cpu"]) == 0
    commands = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  alignment")]
    assert [words[0] for words in commands] == ["fit", "export", "fit"]
    short = ["--trainer.max_steps=1", "--data.batch_size=2", "--data.max_rows=8", "--data.max_eval_rows=2"]
    for words in commands:
        assert main([*words, *(short if words[0] == "fit" else [])]) == 0


def test_a_machine_with_less_memory(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"signal": "pairs", "diversity": "no", "compute": "little", "length": "short"}
    save_tiny(Path("model"))
    model = ["--model=model", "--device=cpu"]
    assert main(["advise", *flags(answers), *model]) == 0
    fits = yaml.safe_load(Path("advised/dpo.yaml").read_text())["model"]["init_args"]
    assert main(["advise", *flags(answers), *model, "--force", "--memory=0.0001"]) == 2
    assert "take a smaller model" in capsys.readouterr().err
    assert main(["advise", *flags(answers), *model, "--memory=0.012", "--force"]) == 0
    said = capsys.readouterr().out
    assert "does not fit as it is" in said
    less = yaml.safe_load(Path("advised/dpo.yaml").read_text())["model"]["init_args"]
    assert less != fits


def test_mistakes(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(*words: str) -> str:
        assert main(["advise", *words]) == 2
        return capsys.readouterr().err

    assert "What says which reply is good? Answer with --signal demonstrations or labels" in line()
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    grpo = ["--signal=reward", "--rewards=one"]
    assert "needs rewards for your rows: --reward NAME=PATH" in line(*grpo, "--data=rows.jsonl")
    assert "--reward takes NAME=PATH" in line(*grpo, "--reward=right")
    several = ["--signal=reward", "--rewards=several", "--trade=now"]
    assert "give --reward once for each" in line(*several, "--reward=a=b.c")
    assert "KTO takes no rewards of yours" in line("--signal=labels", "--reward=a=b.c")
    Path("advised").mkdir()
    Path("advised/kto.yaml").write_text("mine")
    assert "advised/kto.yaml exists" in line("--signal=labels")
    assert Path("advised/kto.yaml").read_text() == "mine"


def test_questions_at_a_terminal(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second answer by its number, after one that is none; then one by its name."""
    said = iter(["9", "3", "yes", "general"])
    monkeypatch.setattr(advise_command.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(["advise", "--device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "a number from 1 to 4" in shown
    assert "Start with GeneralizedRPO" in shown


def test_adapters_learn_faster() -> None:
    """Ten times the rate of all weights; what makes it fit is in the configuration."""
    changes = {"policy": {"lora": {"r": 16}}, "reference": "adapter_off"}
    found = advise_command.configuration(
        DPO, model="m", data="d", rewards={}, changes=changes, reply_tokens=1, device="cuda"
    )
    settings = found["model"]["init_args"]
    assert settings["policy"] == {"name": "m", "lora": {"r": 16}}
    assert settings["reference"] == "adapter_off"
    assert settings["optim"]["lr"] == pytest.approx(1e-5)
    assert found["trainer"]["precision"] == "bf16-mixed"
