"""configs/presets/models/: each file parses as its comment says and adapts the layers it means; one an architecture
trains, on a small model of that architecture. docs/models.md: its table is these files, its commands run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
import yaml
from torch import nn

from alignment.cli import main
from alignment.policy import LoRAConfig, add_lora
from alignment.tiny import save_tiny, tiny_tokenizer
from tests.architectures import DENSE, build
from tests.integration.test_docs import SMALL, blocks, commands

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "configs" / "presets" / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
ONE_STEP = ["--data.max_rows=4", "--data.max_eval_rows=2", "--data.batch_size=4", "--trainer.fast_dev_run=1", *QUIET]


def with_vision() -> hf.PreTrainedConfig:
    """Gemma 3 from 4B on: a language model with a vision tower."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.Gemma3Config(
        text_config=DENSE["gemma3"]().to_dict(),
        vision_config=hf.SiglipVisionConfig(**vision, image_size=28, patch_size=14),
        mm_tokens_per_image=1,
    )


BUILT: dict[str, Callable[[], hf.PreTrainedConfig]] = {**DENSE, "gemma3-vision": with_vision}
TRAINED = {
    "llama": "llama3_8b",
    "llama-tied": "smollm2_135m",
    "qwen2": "qwen25_0_5b",
    "qwen3": "qwen3_0_6b",
    "gemma3": "gemma3_1b",
    "gemma3-vision": "gemma3_4b",
    "mistral": "mistral_7b",
    "phi3": "phi4_mini",
    "olmo2": "olmo2_1b",
    "smollm3": "smollm3_3b",
}
"""Of each architecture, the file that is trained."""
ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
ALL_LINEAR = {"phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}}
"""All linear layers but the head, where they are not those of Llama."""


def architecture(name: str) -> str:
    """That of the model which a file is for."""
    if name == "gemma3_4b":
        return "gemma3-vision"
    family = name.split("_")[0]
    families = {"llama3": "llama", "qwen25": "qwen2", "phi4": "phi3", "smollm2": "llama-tied"}
    return families.get(family, family)


@cache
def settings(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["model"]["init_args"]


def lines(name: str) -> list[list[str]]:
    """Words of the two commands in a file's comment, SFT and DPO, with their files where they are."""
    found = re.findall(r"^# (SFT|DPO): alignment (fit .*)$", (FOLDER / f"{name}.yaml").read_text(), flags=re.MULTILINE)
    assert [kind for kind, _ in found] == ["SFT", "DPO"]
    return [
        [str(REPOSITORY / word) if word.startswith("configs/") else word for word in shlex.split(line)]
        for _, line in found
    ]


def rate(name: str, kind: int) -> float:
    """The learning rate in force: for SFT (0) and for DPO (1)."""
    given = re.findall(r"--model\.optim\.lr (\S+)", " ".join(lines(name)[kind]))
    return float(given[0]) if given else settings(name)["optim"]["lr"]


def fits(config: hf.PreTrainedConfig) -> hf.PreTrainedConfig:
    """`config` with the vocabulary and the special tokens of the tiny tokenizer."""
    tokenizer = tiny_tokenizer()
    for part in {id(p): p for p in (config, config.get_text_config(decoder=True))}.values():
        part.update({f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")})
    text = config.get_text_config(decoder=True)
    # A tokenizer that is read beside such a configuration may add a token of its own.
    text.update({"vocab_size": len(tokenizer) + 8, "max_position_embeddings": 2048})
    return config


def holds(found: Any, said: Any) -> bool:
    """Whether all that is said is so, mappings key by key."""
    if isinstance(said, dict) and isinstance(found, dict):
        return all(holds(found[key], value) for key, value in said.items())
    return bool(found == said)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_says_all_it_should_and_parses(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Upon the files of both of its commands, which differ in the base and the rate."""
    text = (FOLDER / f"{name}.yaml").read_text()
    for part in ("# Template: ", "# Access: ", r"recipes/\S+\.yaml|docs/\S+\.(md|ipynb)"):
        assert re.search(part, text), part
    sft, dpo = lines(name)
    overlay = str(FOLDER / f"{name}.yaml")
    assert sft == ["fit", "-c", str(REPOSITORY / "configs" / "sft.yaml"), "-c", overlay]
    assert dpo[:6] == ["fit", "-c", str(REPOSITORY / "configs" / "dpo.yaml"), "-c", overlay, "--model.optim.lr"]
    assert rate(name, 1) <= rate(name, 0)
    said = yaml.safe_load(text)
    for words, kind, lr in ((sft, "SFT", rate(name, 0)), (dpo, "DPO", rate(name, 1))):
        assert main([*words, "--print_config"]) == 0
        resolved = yaml.safe_load(capsys.readouterr().out)
        assert resolved["model"]["class_path"] == f"modules.{kind}"
        assert resolved["model"]["init_args"]["optim"]["lr"] == lr
        said["model"]["init_args"]["optim"]["lr"] = lr
        assert holds(resolved, said)


@pytest.mark.parametrize("name", [name for name in NAMES if "lora" in settings(name)["policy"]])
def test_adapters_are_where_the_file_says(name: str) -> None:
    kind = architecture(name)
    lora = settings(name)["policy"]["lora"]
    model = add_lora(hf.AutoModelForCausalLM.from_config(fits(BUILT[kind]())), LoRAConfig(**lora))
    end = ".lora_A.default"
    adapted = {path.removesuffix(end) for path, _ in model.named_modules() if path.endswith(end)}
    targets = lora.get("target_modules", "all-linear")
    expected = set(targets) if isinstance(targets, list) else ALL_LINEAR.get(kind, ATTENTION | MLP)
    assert {path.rpartition(".")[2] for path in adapted} == expected
    layers = {re.search(r"\.layers\.(\d+)\.", path)[1] for path in adapted}  # type: ignore[index]
    assert layers == {"0", "1", "2"}
    assert len(adapted) == 3 * len(expected)
    assert not [path for path in adapted if "vision" in path]


@pytest.mark.parametrize("kind", TRAINED)
def test_a_preset_of_each_architecture_trains(kind: str, workdir: Path) -> None:
    """SFT and DPO by the commands in its comment, on a small model in place of the hub's."""
    assert architecture(TRAINED[kind]) == kind
    config = fits(BUILT[kind]())
    build(config).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    here = ["--model.policy.name=model", "--model.policy.tokenizer=model"]
    for words in lines(TRAINED[kind]):
        assert main([*words, *here, *ONE_STEP]) == 0


def test_every_architecture_is_trained() -> None:
    assert {architecture(name) for name in NAMES} == set(TRAINED)


# ---------------------------------------------------------------------- docs/models.md


def test_the_table_is_the_files() -> None:
    text = (REPOSITORY / "docs" / "models.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| [")]
    found = {re.match(r"\[(\w+)\]", row[0])[1]: row for row in rows}  # type: ignore[index]
    assert sorted(found) == NAMES
    for name, (link, model, trained, sft, dpo, batch) in found.items():
        policy = settings(name)["policy"]
        data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["data"]["init_args"]
        assert link == f"[{name}](../configs/presets/models/{name}.yaml)"
        assert model == f"`{policy['name']}`"
        form = f"LoRA {policy['lora']['r']}" if "lora" in policy else "all weights"
        assert trained == (f"{form}, 4-bit base" if policy.get("quantization") == "4bit" else form)
        assert (float(sft), float(dpo), int(batch)) == (rate(name, 0), rate(name, 1), data["batch_size"])


def test_the_commands_of_the_page_run(workdir: Path) -> None:
    """In the order of the page, with a small model where it names a hub's."""
    (workdir / "configs").symlink_to(REPOSITORY / "configs")
    save_tiny("small")
    rows = [{"prompt": f"say {i}", "completion": f"yes {i}"} for i in range(8)]
    pairs = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(8)]
    for file, content in (("my_rows.jsonl", rows), ("my_pairs.jsonl", pairs)):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in content))
    assert len(blocks("models.md", "bash")) == 1
    for line in commands("models.md"):
        words = shlex.split(line)[1:]
        hub = words[0] == "fit" and "--model.policy.name" not in words
        small = [*SMALL, "--trainer.accelerator=cpu"] if words[0] == "fit" else []
        assert main([*words, *(["--model.policy.name=small"] if hub else []), *small]) == 0, line
    assert isinstance(hf.AutoModelForCausalLM.from_pretrained("models/mine"), nn.Module)
