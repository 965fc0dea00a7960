"""What `alignment export` writes beside a model: a card that tells where it comes from, GGUF, a copy on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from alignment.cli import main
from alignment.model_card import CONVERTER, write_card

REPOSITORY = Path(__file__).resolve().parents[2]
FIT = ["--trainer.max_steps=2", "--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4"]
FIT += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.fixture
def trained(workdir: Path) -> Path:
    assert main(["fit", "-c", str(REPOSITORY / "configs" / "dpo.yaml"), *FIT]) == 0
    (run,) = Path("runs").glob("*/*")
    return run


def parts(card: Path) -> tuple[dict[str, Any], str]:
    _, head, body = card.read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_of_a_run(trained: Path) -> None:
    assert main(["export", "last", "mine", "--license", "apache-2.0"]) == 0
    head, body = parts(Path("mine/README.md"))
    assert head == {"library_name": "transformers", "tags": ["lightning-alignment", "dpo"], "license": "apache-2.0"}
    assert "# mine" in body
    assert "Trained with DPO from `tiny`" in body
    assert "Licence: apache-2.0." in body
    assert "| path | `world:support` |" in body
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    loss = [row["val/loss"] for row in logged if "val/loss" in row][-1]
    assert f"| val/loss | {loss:.4g} |" in body
    assert json.loads((trained / "run.json").read_text())["run_id"] in body
    config = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert config["model"]["init_args"]["optim"]["lr"] == 1e-3
    AutoModelForCausalLM.from_pretrained("mine")


def test_a_base_model_of_the_hub_is_named(workdir: Path) -> None:
    """A local folder is not: the hub would take it for a repository of somebody else's."""
    out, run = Path("out"), Path("run")
    for name in ("mine/folder", "org/model"):
        checkpoint = run / "checkpoints" / "step"
        (run / "config").mkdir(parents=True, exist_ok=True)
        checkpoint.mkdir(parents=True, exist_ok=True)
        out.mkdir(exist_ok=True)
        Path("mine/folder").mkdir(parents=True, exist_ok=True)
        config = {"model": {"class_path": "modules.SFT", "init_args": {"policy": {"name": name}}}}
        (run / "config" / "fit.yaml").write_text(yaml.safe_dump(config))
        head, body = parts(write_card(checkpoint, out))
        assert head.get("base_model") == (name if name == "org/model" else None)
        assert "Licence: not stated" in body


def test_gguf_by_llama_cpp(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The converter gets folder, file and type; what it says when it fails is told in one line."""
    folder = Path("llama.cpp")
    folder.mkdir()
    script = folder / CONVERTER
    script.write_text("import sys; open(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))")
    assert main(["export", "last", "mine", "--gguf", "q8_0", "--llama_cpp", "llama.cpp"]) == 0
    assert Path("mine/mine-q8_0.gguf").read_text() == "mine --outfile mine/mine-q8_0.gguf --outtype q8_0"
    script.write_text("import sys; print('loading'); sys.exit('no such architecture')")
    assert main(["export", "last", "other", "--gguf", "q8_0", "--llama_cpp", "llama.cpp"]) == 2
    assert "could not convert 'other' to q8_0: no such architecture" in capsys.readouterr().err
    assert main(["export", "last", "third", "--gguf", "f16", "--llama_cpp", "nowhere"]) == 2
    assert f"needs llama.cpp's {CONVERTER}, and there is none in 'nowhere'" in capsys.readouterr().err
    assert not Path("third").exists()


def test_a_copy_on_the_hub(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Hub:
        def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> str:
            asked.append((repository, private, exist_ok))
            return "https://hub/me/mine"

        def upload_folder(self, *, repo_id: str, folder_path: str) -> None:
            asked.append((repo_id, sorted(file.name for file in Path(folder_path).glob("*.md"))))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert main(["export", "last", "mine", "--push", "me/mine", "--private"]) == 0
    assert asked == [("me/mine", True, True), ("me/mine", ["README.md"])]
    assert "https://hub/me/mine holds a copy" in capsys.readouterr().out

    def refuse(self: Hub, repository: str, **_: object) -> str:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(Hub, "create_repo", refuse)
    assert main(["export", "last", "again", "--push", "me/mine"]) == 2
    assert "'again' is exported, but the hub did not take it as 'me/mine': no network" in capsys.readouterr().err
    assert Path("again/config.json").is_file()
