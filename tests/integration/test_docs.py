"""What docs/ shows a user works as shown: the code as a file of theirs, the commands through the command line."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alignment.advantages import RewardTable
from alignment.cli import main
from alignment.findings import PLACES
from alignment.losses import PairLogRatios
from alignment.pair_objective import find
from alignment.policy_losses import PolicyTokens
from alignment.rewards import SHIPPED
from alignment.tiny import save_tiny
from callbacks import NanGuard
from tests.vllm_stub import serving

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs" / "trainer"
SMALL = ["--data.max_rows=8", "--data.max_eval_rows=4", "--data.batch_size=4", "--trainer.max_steps=1"]
SMALL += ["--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0", "--trainer.enable_model_summary=false"]
SHORT = ["--model.completions=2", "--model.sampling.max_tokens=4"]
"""What makes a command of a page short, without changing what it does."""
EPOCH = ["--data.max_rows=4"]
"""One batch, so that validation follows."""


def blocks(page: str, *kinds: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return [body for kind, body in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL) if kind in kinds]


def commands(page: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line]


def run(line: str) -> None:
    words = shlex.split(line)[1:]
    if words[0] == "fit":
        samples = any(f"configs/{name}.yaml" in words for name in ("grpo", "ppo", "online_dpo", "customer_support"))
        words += [*SMALL, *(SHORT if samples else [])]
    if words[0] == "predict":
        words += ["--data.max_eval_rows=4"]
    assert main(words) == 0, line


@pytest.fixture
def folder(workdir: Path) -> Path:
    shutil.copytree(REPOSITORY / "configs", workdir / "configs")
    return workdir


def test_online_commands(folder: Path) -> None:
    """In the order of the page: the reward model that the last ones need is made by those before them."""
    save_tiny(folder / "models" / "mine")
    rows = [{"prompt": f"Say {n}.", "answer": f"{n} years"} for n in range(8)]
    (folder / "my_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for line in commands("online.md"):
        run(line)
    written = [json.loads(line) for line in next(folder.rglob("predictions.jsonl")).read_text().splitlines()]
    assert len(written) == 4
    assert set(written[0]["rewards"]) == {"right", "warm", "short"}


def test_reference_commands(folder: Path) -> None:
    for line in commands("reference.md"):
        run(line)


def test_the_flags_that_add_a_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(re.findall(r"`(--model\.rewards\.overlong.*?)`", (REPOSITORY / "docs" / "online.md").read_text()))
    assert main(["fit", "-c", "configs/grpo.yaml", *shlex.split(text), "--print_config"]) == 0
    rewards = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["rewards"]
    assert list(rewards) == ["right", "warm", "short", "overlong"]
    assert rewards["overlong"]["args"] == {"max_tokens": 64, "buffer": 16}


def test_sampling_from_a_server(folder: Path) -> None:
    (text,) = blocks("online.md", "yaml")
    with serving() as stub:
        Path("server.yaml").write_text(text.replace("http://localhost:8000", stub.url))
        assert main(["fit", "-c", "configs/grpo.yaml", "-c", "server.yaml", *SMALL, *SHORT, *EPOCH]) == 0
        assert "/update_weights" in stub.paths
        assert stub.paths.count("/v1/completions") == 4 + 4  # training prompts, held-out ones
    assert list(Path("weights").glob("version-*"))


def test_the_metrics_of_the_page_are_logged(folder: Path) -> None:
    """Those that every run of GRPO or of PPO has."""
    page = (REPOSITORY / "docs" / "online.md").read_text().split("## Metrics")[1].split("## When")[0]
    named: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE):
        first = ""
        for name in re.findall(r"`([^`]+)`", row):
            first = name if not name.startswith("/") else first
            named.add(first.rpartition("/")[0] + name if name.startswith("/") else name)
    named = {name.replace("NAME", "warm") for name in named if "LABEL" not in name}
    named = {name for name in named if not name.startswith(("dynamic_sampling/", "sampler/", "nonfinite/", "pairs/"))}
    logged: set[str] = set()
    for config in ("grpo", "ppo"):
        words = ["fit", "-c", f"configs/{config}.yaml", *SMALL, *SHORT, *EPOCH, "--model.kl.measure=true"]
        assert main([*words, "--trainer.log_every_n_steps=1", f"--trainer.logger.run_name={config}"]) == 0
    for file in folder.rglob("metrics.jsonl"):
        logged |= {name for line in file.read_text().splitlines() for name in json.loads(line)}
    assert named | {"val/reward", "val/rewards/warm/mean"} <= logged, named - logged
    assert len(list(folder.rglob("samples.jsonl"))) == 2


# ---------------------------------------------------------------------- generalized_rpo.md


def test_generalized_rpo_commands_and_domains(folder: Path) -> None:
    """And the page's YAML of domains, over the configuration."""
    for line in commands("generalized_rpo.md"):
        run(line)
    (text,) = blocks("generalized_rpo.md", "yaml")
    (folder / "domains.yaml").write_text(yaml.safe_dump({"model": {"init_args": yaml.safe_load(text)}}))
    files = ["-c", "configs/generalized_rpo.yaml", "-c", "domains.yaml"]
    assert main(["fit", *files, *SMALL, *EPOCH, "--trainer.log_every_n_steps=1"]) == 0
    logged: set[str] = set()
    for file in folder.rglob("metrics.jsonl"):
        logged |= {name for line in file.read_text().splitlines() for name in json.loads(line)}
    page = (REPOSITORY / "docs" / "generalized_rpo.md").read_text()
    told = {"grad_norm/states/dpo", "grad/clip_coef/smooth", "p_mean", "entropy", "val/worst_domain/accuracies"}
    told |= {"domain/right/loss", "domain/right/accuracies", "domain/right/margins", "domain/right/weight"}
    assert told <= logged
    named = ("grad_norm/states/NAME", "grad/clip_coef/NAME", "p_mean", "val/worst_domain/accuracies")
    assert all(f"`{name}`" in page for name in (*named, "domain/NAME/loss"))


# ---------------------------------------------------------------------- extending.md


def test_extending_commands(folder: Path) -> None:
    """Each piece of code as the file that its first line names; then each command."""
    for code in blocks("extending.md", "python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None
        (folder / name[1]).write_text(code)
    for line in commands("extending.md"):
        run(line)


def test_one_line_of_yaml(folder: Path) -> None:
    """The YAML of the page, all of it in one configuration, over GRPO's."""
    for code in blocks("extending.md", "python"):
        (folder / code.split()[1]).write_text(code)
    lines = [yaml.safe_load(text) for text in blocks("extending.md", "yaml")]
    assert [list(line) for line in lines] == [["advantage"], ["loss"]]
    (folder / "own.yaml").write_text(yaml.safe_dump({"model": {"init_args": lines[0] | lines[1]}}))
    assert main(["fit", "-c", "configs/grpo.yaml", "-c", "own.yaml", *SMALL, *SHORT, *EPOCH]) == 0


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """name of a file of the page -> its module."""
    monkeypatch.syspath_prepend(str(folder))
    for code in blocks("extending.md", "python"):
        (folder / code.split()[1]).write_text(code)
    return import_module


def test_a_preference_loss_of_ones_own(own: Any) -> None:
    one = torch.ones(1)
    pairs = PairLogRatios(chosen=3 * one, rejected=one, chosen_tokens=one, rejected_tokens=one)
    loss = own("my_losses").squared_hinge
    assert loss(pairs, 0.1, 0.0).item() == pytest.approx(0.64)  # (1 - 0.1 * 2)^2
    found = find("my_losses.squared_hinge")
    assert (found.fn, found.beta, found.smoothing) == (loss, 0.05, 0.0)


def test_a_reward_of_ones_own(own: Any) -> None:
    reward = own("my_rewards").one_sentence
    assert [reward(text) for text in ("Yes.", "Yes. No!", "yes")] == [1.0, 0.0, 0.0]


def test_an_advantage_of_ones_own(own: Any) -> None:
    """Means 0.5 and 0.2; the last completion has no reward, its group's other one is alone."""
    scores = torch.tensor([1.0, 0.0, 0.6, 0.4, 0.2, torch.nan])
    table = RewardTable.of_scores(scores, torch.tensor([0, 0, 0, 0, 1, 1]))
    assert own("my_advantages").sign(table, margin=0.2).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_policy_loss_of_ones_own(own: Any) -> None:
    """Ratios 1, 5 and 1/2 under advantages 2, 2 and -1, with the cap at 2."""
    old = torch.tensor([0.5, 0.1, 0.5]).log()
    tokens = PolicyTokens(
        logps=torch.tensor([0.5, 0.5, 0.25]).log(),
        old_logps=old,
        advantages=torch.tensor([2.0, 2.0, -1.0]),
        scored=torch.ones(3, dtype=torch.bool),
        row_of=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([3]),
    )
    assert own("my_policy_losses").capped(tokens).tolist() == pytest.approx([-2.0, -4.0, 0.5])


# ---------------------------------------------------------------------- rewards.md


def test_rewards_of_ones_own(folder: Path) -> None:
    """The code and the YAML of the page, on prompts with the column that it names."""
    (code,), (settings,) = blocks("rewards.md", "python"), blocks("rewards.md", "yaml")
    (folder / "my_rewards.py").write_text(code)
    (folder / "own.yaml").write_text(yaml.safe_dump({"model": {"init_args": yaml.safe_load(settings)}}))
    rows = [{"prompt": f"Say {n}.", "keywords": ["a", "e"]} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-c", "configs/grpo.yaml", "-c", "own.yaml", "--data.path=rows.jsonl", "--data.val_fraction=0.3"]
    assert main(["fit", *words, *SMALL, *SHORT, "--trainer.log_every_n_steps=1"]) == 0
    (file,) = folder.rglob("metrics.jsonl")
    logged = json.loads(file.read_text().splitlines()[0])
    assert {f"rewards/{name}/mean" for name in ("overlap", "polite", "short")} <= set(logged)
    assert all(logged[f"rewards/{name}/faults"] == 0 for name in ("overlap", "polite", "short"))


def test_rewards_commands(folder: Path) -> None:
    pytest.importorskip("rank_bm25")
    pytest.importorskip("vaderSentiment")
    install, *lines = commands("rewards.md")
    assert install == "pip install 'lightning-alignment[rewards]'"
    assert len(lines) == 2
    for line in lines:
        run(f"{line} --trainer.log_every_n_steps=1 --model.sampling.min_tokens=0")
    logged = "".join(file.read_text() for file in sorted(folder.rglob("metrics.jsonl")))
    for name in ("professional", "sentiment", "efficient"):
        assert f'"rewards/{name}/mean"' in logged


def test_every_reward_that_ships_is_on_the_page() -> None:
    """And every fragment, once."""
    page = (REPOSITORY / "docs" / "rewards.md").read_text()
    table = page.split("## Rewards that ship")[1].split("## Judges")[0]
    assert set(SHIPPED) == set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE))))
    named = re.findall(r"`(\w+\.yaml)` \|$", table, flags=re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (REPOSITORY / "configs" / "rewards").glob("*.yaml"))


def test_sharding_as_the_page_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its block is what the file for 8 devices says, and every file it names is there and parses."""
    (block,) = blocks("scale.md", "yaml")
    shown, shipped = (yaml.safe_load(text)["trainer"] for text in (block, (CONFIGS / "fsdp8.yaml").read_text()))
    assert shown == {name: shipped[name] for name in shown}
    lines = [
        *commands("scale.md"),
        *(part for text in blocks("scale.md", "sh") for part in re.findall(r"alignment fit -c \S+ -c \S+", text)),
    ]
    assert len(lines) == 4
    for line in lines:
        capsys.readouterr()
        words = shlex.split(line, comments=True)[1:]
        assert main([*words, "--print_config"]) == 0
        assert "callbacks.FSDP2" in capsys.readouterr().out


# ---------------------------------------------------------------------- reliability.md


def test_reliability_commands_and_places(folder: Path) -> None:
    for line in commands("reliability.md"):
        run(line)
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    named = {name for row in re.findall(r"^\| ([a-z, -]+) \|", page, flags=re.MULTILINE) for name in row.split(", ")}
    assert set(PLACES) <= named
    assert all(f"`{name}" in page for name in inspect.signature(NanGuard).parameters)
