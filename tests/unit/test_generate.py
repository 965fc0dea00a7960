"""`alignment generate` and `alignment chat`: the model that is named answers, whatever the name is."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
import torch

from alignment.chat import ChatEncoder, Message
from alignment.chat_command import Conversation
from alignment.cli import main
from alignment.errors import UserError
from alignment.policy import PolicyConfig, load_policy
from alignment.ready import ready
from alignment.tiny import save_tiny

FIT = ["--trainer.max_steps=1", "--data.max_rows=8", "--data.max_eval_rows=2", "--data.batch_size=4"]
FIT += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
REPOSITORY = Path(__file__).resolve().parents[2]


def prompts(path: Path, count: int = 5) -> None:
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": i}) + "\n" for i in range(count)))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_replies_to_a_file(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts(Path("p.jsonl"))
    command = ["generate", "p.jsonl", "out.jsonl", "--model=tiny", "--max_tokens=5", "--device=cpu"]
    assert main(command) == 0
    assert "out.jsonl holds 5 replies of tiny" in capsys.readouterr().out
    rows = lines(Path("out.jsonl"))
    assert [row["index"] for row in rows] == list(range(5))
    assert [row["answer"] for row in rows] == list(range(5))
    assert all("say" in str(row["prompt"]) and 1 <= int(str(row["tokens"])) <= 5 for row in rows)
    assert main([*command, "--force", "--samples=2", "--temperature=1", "--max_rows=2"]) == 0
    rows = lines(Path("out.jsonl"))
    assert [row["index"] for row in rows] == [0, 0, 1, 1]
    assert rows[0]["completion"] != rows[1]["completion"]


def test_the_likeliest_tokens(workdir: Path) -> None:
    """Greedy, against the model itself, token by token."""
    prompts(Path("p.jsonl"), 1)
    assert main(["generate", "p.jsonl", "out.jsonl", "--model=tiny", "--max_tokens=4", "--device=cpu"]) == 0
    loaded = ready("tiny", device="cpu")
    ids = ChatEncoder(tokenizer=loaded.tokenizer).prompt("say 0")
    written: list[int] = []
    for _ in range(4):
        with torch.no_grad():
            token = int(loaded.model(torch.tensor([ids + written])).logits[0, -1].argmax())
        written.append(token)
        if token == loaded.tokenizer.eos_token_id:
            break
    assert lines(Path("out.jsonl"))[0]["completion"] == loaded.tokenizer.decode(written, skip_special_tokens=True)


def test_a_checkpoint_a_run_and_an_adapter(workdir: Path) -> None:
    """`last`, the run's folder and the exported adapter are one model, and not the one it started from."""
    save_tiny(Path("base"))
    config = str(REPOSITORY / "configs" / "sft.yaml")
    more = ["--model.policy.name=base", "--model.policy.lora.r=4", "--model.optim.lr=0.05"]
    more.append("--model.optim.warmup_steps=0")
    assert main(["fit", "-c", config, *FIT, *more]) == 0
    assert main(["export", "last", "adapter", "--merge_lora", "false"]) == 0
    (run,) = Path("runs").glob("*/*")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        found = [ready(name, device="cpu").model(ids).logits for name in ("last", str(run), "adapter")]
        start = ready("base", device="cpu").model(ids).logits
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert not torch.allclose(found[0], start, atol=1e-3)


def test_a_policy_with_heads_answers_fused(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads begin at nothing and learn in every third step, from rewards that tell completions apart."""
    Path("tone.py").write_text("def odd(completion):\n    return len(completion) % 2\n"
                               "def size(completion):\n    return len(completion)\n")  # fmt: skip
    monkeypatch.syspath_prepend(str(workdir))
    config = str(REPOSITORY / "configs" / "decoupled_po.yaml")
    short = ["--model.completions=4", "--model.sampling.max_tokens=4", "--trainer.limit_val_batches=0"]
    here = "{{reward: tone.{0}, in_process: true}}".format
    short += [f"--model.rewards={{odd: {here('odd')}, size: {here('size')}}}"]
    short += ["--model.optim.lr=0.01", "--model.optim.warmup_steps=0", "--trainer.max_epochs=2"]
    short += ["--trainer.max_steps=3"]
    assert main(["fit", "-c", config, *FIT, *short]) == 0
    assert main(["export", "last", "exported"]) == 0
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        fused, exported = (ready(name, device="cpu").model(ids).logits for name in ("last", "exported"))
        trunk = load_policy(PolicyConfig(name="exported"))(ids).logits
    torch.testing.assert_close(fused, exported)
    assert not torch.equal(fused, trunk)
    trained = ready("last", device="cpu")
    before = trained.digest()
    assert trained.heads is not None
    trained.heads.prefer({"odd": 3.0, "size": 1.0})
    assert trained.digest() != before


def test_mistakes_of_generate(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(*words: str) -> str:
        assert main(["generate", "p.jsonl", "out.jsonl", *words]) == 2
        return capsys.readouterr().err

    prompts(Path("p.jsonl"))
    assert "no run below" in line("--model=last")
    assert "--temperature 0 gives the same reply each time" in line("--model=tiny", "--samples=2")
    assert "--samples is 0" in line("--model=tiny", "--samples=0")
    Path("p.jsonl").unlink()
    assert "p.jsonl" in line("--model=tiny")
    Path("out.jsonl").write_text("mine")
    assert "'out.jsonl' exists" in line("--model=tiny")
    assert Path("out.jsonl").read_text() == "mine"
    assert list(Path(".").glob(".out*")) == []


# ------------------------------------------------------------------------------------------------ chat


def conversation(**changes: object) -> Conversation:
    settings = {"system": "be kind", "max_tokens": 4, "temperature": 0.0, "top_p": 1.0, **changes}
    return Conversation(ready("tiny", device="cpu"), **settings)  # type: ignore[arg-type]


def test_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    """What was said before is read again; a new start answers as the first time."""
    talk = conversation()
    first = talk.reply("hello")
    assert first.strip() in capsys.readouterr().out
    talk.reply("and now?")
    assert [turn.role for turn in talk.turns] == ["user", "assistant"] * 2
    assert talk.turns[1] == Message("assistant", first)
    talk.reset()
    assert talk.turns == []
    assert talk.reply("hello") == first


def test_old_turns_make_room() -> None:
    talk = conversation()
    room = talk._room
    assert room is not None
    talk.turns = [Message("user", "word " * (room // 2)), Message("assistant", "word " * (room // 2))]
    talk.reply("hello")
    assert [turn.content for turn in talk.turns][:1] == ["hello"]
    with pytest.raises(UserError, match="has room for"):
        talk.reply("word " * 2 * room)
    assert talk.turns == []


def test_at_the_terminal(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["hello", "", "/reset", "/quit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(said))
    assert main(["chat", "tiny", "--max_tokens=3", "--device=cpu"]) == 0
    assert "model> " in capsys.readouterr().out
    assert list(said) == []
    assert main(["chat", "nowhere/at/all"]) == 2
    assert "no model folder" in capsys.readouterr().err
    assert main(["chat", "tiny", "--top_p=0"]) == 2
    assert "--top_p" in capsys.readouterr().err
