"""What a command line resolves to: start-up, composition of files, plug-ins, what every run gets unasked."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import rich.progress
import yaml
from rich.console import Console

import tests.cli_toys  # noqa: F401  # makes ToyModule and ToyData known by their short names
from alignment import check_siblings, lightning_cli, ui
from alignment.checkpoint import SafeCheckpointIO
from alignment.cli import SUBCOMMANDS, main
from alignment.lightning_cli import AlignmentCLI
from alignment.tracking import TrackingLogger
from callbacks import Progress, Signals

RUN = ["fit", "--model", "ToyModule", "--data", "ToyData", "--data.path", "here", "--trainer.accelerator", "cpu"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class Parsed(AlignmentCLI):
    """Everything is built, nothing is run."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.ran = subcommand


def resolved(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """What `--print_config` says."""
    assert main([*args, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


# ---------------------------------------------------------------------- start-up


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; from alignment.cli import main; code = main(['--help']);"
        "print(sorted(m for m in ('torch', 'lightning', 'transformers', 'mlflow') if m in sys.modules)); sys.exit(code)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent)
    assert time.monotonic() - started < 3
    *text, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert all(any(line.split()[:1] == [name] for line in text) for name in SUBCOMMANDS)


@pytest.mark.parametrize("given", [None, "0"])
def test_torch_is_asked_for_large_pages_unless_the_environment_says_otherwise(given: str | None) -> None:
    code = "import os; from alignment.cli import main; main(['--version']); print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    env = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    env |= {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent, env=env
    )
    assert done.stdout.splitlines()[-1] == (given or "1")


def test_bitsandbytes_does_not_ask_for_a_kernel() -> None:
    """Whichever of our modules brings it in: the line is printed when it is imported."""
    code = "import alignment.policy, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent)
    assert "kernels" not in done.stdout + done.stderr


def test_python_m_alignment_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "alignment", "--version"], capture_output=True, text=True, check=True, cwd=CONFIGS.parent
    )
    assert done.stdout == "lightning-alignment 0.1.0\n"


def test_shadowed_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"package 'modules' at .*elsewhere.*, but it resolves to .*modules"):
        check_siblings(tmp_path / "elsewhere")


# ---------------------------------------------------------------------- composition


def test_later_files_and_flags_win(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    Path("a.yaml").write_text("model: {init_args: {beta: 1, note: a}}\ntrainer: {max_steps: 3, limit_val_batches: 5}\n")
    Path("b.yaml").write_text("model: {init_args: {note: b}}\ntrainer: {max_steps: 4}\n")
    config = resolved(capsys, *RUN, "-c", "a.yaml", "-c", "b.yaml", "--trainer.limit_val_batches", "6")
    assert config["model"]["init_args"]["beta"] == 1
    assert config["model"]["init_args"]["note"] == "b"
    assert (config["trainer"]["max_steps"], config["trainer"]["limit_val_batches"]) == (4, 6)


@pytest.mark.parametrize("words", [["--model.policy.revision=null"], ["--model.policy.revision", "null"]], ids=str)
@pytest.mark.parametrize("start", [["-c", str(CONFIGS / "dpo.yaml")], ["--model=DPO"]], ids=["file", "class"])
def test_null_inside_a_setting(
    capsys: pytest.CaptureFixture[str], workdir: Path, start: list[str], words: list[str]
) -> None:
    """It takes back what a file or an earlier flag has set, and is not the text 'None'; later flags win as ever."""
    assert main(["fit", *start, "--model.policy.revision=main", *words, "--print_config"]) == 0
    policy = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["policy"]
    assert (policy["revision"], policy["name"]) == (None, "tiny")
    assert main(["fit", *start, *words, "--model.policy.revision=v2", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["policy"]["revision"] == "v2"


def test_fragments_and_appended_callbacks(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    callbacks = CONFIGS / "callbacks" / "default.yaml"
    Path("run.yaml").write_text(f"trainer: {{max_steps: 3, callbacks: {callbacks}}}\n")
    extra = ["--trainer", str(CONFIGS / "trainer" / "ddp2.yaml"), "--trainer.callbacks+=Timer"]
    trainer = resolved(capsys, *RUN, "-c", "run.yaml", *extra)["trainer"]
    assert (trainer["max_steps"], trainer["strategy"], trainer["devices"]) == (3, "ddp", 2)
    names = [c["class_path"].rpartition(".")[2] for c in trainer["callbacks"]]
    assert names == ["Checkpoint", "LearningRateMonitor", "Timer"]


def test_defaults_that_differ_from_lightning(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    config = resolved(capsys, *RUN)
    assert config["seed_everything"] == 0
    assert config["trainer"]["use_distributed_sampler"] is False
    assert config["trainer"]["logger"]["class_path"] == "alignment.tracking.TrackingLogger"
    assert resolved(capsys, *RUN, "--trainer.logger.run_name=x")["trainer"]["logger"]["init_args"]["run_name"] == "x"


@pytest.mark.parametrize("file", sorted(p.relative_to(CONFIGS).as_posix() for p in (CONFIGS / "debug").glob("*.yaml")))
def test_every_debug_file_has_a_header(file: str) -> None:
    lines = (CONFIGS / file).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 40


QUICKSTART = sorted((CONFIGS / "quickstart").glob("*.yaml"))


@pytest.mark.parametrize("file", QUICKSTART, ids=lambda file: file.stem)
def test_the_quickstarts_files_are_complete_runs(capsys: pytest.CaptureFixture[str], workdir: Path, file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 40
    config = resolved(capsys, "fit", "-c", str(file))
    module = "SFT" if "sft" in file.stem else file.stem.removesuffix("_tiny").upper()
    assert config["model"]["class_path"] == f"modules.{module}"
    assert config["trainer"]["callbacks"][0]["class_path"] == "callbacks.Checkpoint"


TRAINERS = sorted((CONFIGS / "trainer").glob("*.yaml"))


@pytest.mark.parametrize("file", TRAINERS, ids=lambda file: file.name)
def test_trainer_fragments_parse(capsys: pytest.CaptureFixture[str], workdir: Path, file: Path) -> None:
    """Most are what `--trainer` takes; those of sharding add a callback and are configurations for `-c`."""
    assert file.read_text().startswith("# ")
    written = yaml.safe_load(file.read_text())
    whole = "trainer" in written
    words = ["fit", "-c", str(CONFIGS / "dpo.yaml"), "-c"] if whole else [*RUN[:-2], "--trainer"]
    trainer = resolved(capsys, *words, str(file))["trainer"]
    settings = written["trainer"] if whole else written
    added = [each["class_path"] for each in settings.pop("callbacks+", [])]
    assert {each["class_path"] for each in trainer["callbacks"] or []} >= set(added)
    strategy = settings.pop("strategy", None)
    if isinstance(strategy, dict):
        assert trainer["strategy"]["class_path"] == strategy["class_path"]
        assert trainer["strategy"]["init_args"].items() >= strategy["init_args"].items()
    else:
        assert strategy in (None, trainer["strategy"])
    assert {key: trainer[key] for key in settings} == settings


# ---------------------------------------------------------------------- what is importable


def test_a_class_of_the_working_directory(workdir: Path) -> None:
    Path("my_local_toy.py").write_text("from tests.cli_toys import ToyModule\nclass Mine(ToyModule): pass\n")
    cli_args = ["--model", "my_local_toy.Mine", *RUN[3:], "--trainer.fast_dev_run", "1"]
    assert main(["fit", *cli_args, "--trainer.enable_progress_bar", "false"]) == 0
    assert "my_local_toy" in sys.modules


def test_plugins_by_entry_point(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my_plugin.py").write_text("from tests.cli_toys import ToyModule\nclass FromPlugin(ToyModule): pass\n")
    sys.path.append(str(workdir))
    found = [EntryPoint(name="mine", value="my_plugin", group=lightning_cli.PLUGINS)]
    monkeypatch.setattr(lightning_cli, "entry_points", lambda group: found if group == lightning_cli.PLUGINS else [])
    config = resolved(capsys, "fit", "--model", "FromPlugin", *RUN[3:])
    assert config["model"]["class_path"] == "my_plugin.FromPlugin"
    found[:] = [EntryPoint(name="broken", value="no_such_plugin", group=lightning_cli.PLUGINS)]
    assert main(RUN) == 2
    assert "plug-in 'broken' (no_such_plugin) cannot be imported" in capsys.readouterr().err


# ---------------------------------------------------------------------- what every run gets


def test_safe_checkpoints_and_signals_unasked(workdir: Path) -> None:
    cli = Parsed(RUN)
    assert isinstance(cli.trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert sum(isinstance(c, Signals) for c in cli.trainer.callbacks) == 1
    assert isinstance(cli.trainer.logger, TrackingLogger)
    assert cli.ran == "fit"


def test_the_bar_shows_no_id(workdir: Path) -> None:
    cli = Parsed(RUN)
    bar = cli.trainer.progress_bar_callback
    assert isinstance(bar, Progress)
    assert bar.get_metrics(cli.trainer, cli.model) == {}
    console = Console(width=80, record=True, file=io.StringIO())
    shown = rich.progress.Progress(*bar.configure_columns(cli.trainer), console=console, auto_refresh=False)
    shown.add_task("Epoch 0/0", total=32, completed=16)
    console.print(shown.get_renderable())
    # The values come behind: " loss: -0.123 reward: -0.145" at most.
    assert len(console.export_text().rstrip()) + len(" loss: -0.123 reward: -0.145") <= 80
    own = Parsed([*RUN, "--trainer.callbacks+=TQDMProgressBar"]).trainer.progress_bar_callback
    assert type(own).__name__ == "TQDMProgressBar"
    assert Parsed([*RUN, "--trainer.enable_progress_bar=false"]).trainer.progress_bar_callback is None


def test_the_monitored_value_ends_a_fit(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four steps of 0.1 * 0.1 down, so that val/loss is 0.1 * -0.04."""
    monitor = '[{"class_path": "callbacks.Checkpoint", "init_args": {"monitor": "val/loss"}}]'
    assert main([*RUN, "--trainer.max_steps=4", "--trainer.callbacks", monitor]) == 0
    assert "val/loss: -0.004 at the end, at best -0.004" in capsys.readouterr().out


def test_what_the_user_gives_is_kept(workdir: Path) -> None:
    plugin = '[{"class_path": "lightning.fabric.plugins.io.TorchCheckpointIO"}]'
    cli = Parsed([*RUN, "--trainer.plugins", plugin, "--trainer.callbacks+=Signals", "--trainer.callbacks.deadline=7"])
    assert not isinstance(cli.trainer.strategy.checkpoint_io, SafeCheckpointIO)
    assert [c.deadline for c in cli.trainer.callbacks if isinstance(c, Signals)] == [7]


def test_seeded_by_default(workdir: Path) -> None:
    import torch

    Parsed(RUN)
    first = torch.rand(3)
    Parsed(RUN)
    assert torch.equal(first, torch.rand(3))


# ---------------------------------------------------------------------- the UI


def test_ui_serves_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", "--root", str(tmp_path)]) == 2
    assert "no runs yet" in capsys.readouterr().err
    (tmp_path / "mlflow.db").touch()

    def become(program: str, words: list[str]) -> None:
        assert program == sys.executable
        raise SystemExit(3)

    monkeypatch.setattr(ui.os, "execv", become)
    assert main(["ui", "--root", str(tmp_path), "--port", "5055"]) == 3
    words = ui.command(tmp_path, 5055)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "5055"
    assert words[words.index("--backend-store-uri") + 1] == f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(SystemExit):
        ui.main(["--host", "0.0.0.0"])


def test_ui_on_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["ui", "--root", str(tmp_path), "--port", str(port)]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err
    assert main(["ui", "--root", str(tmp_path), "--port", "99999"]) == 2
    assert "a port is a number from 1 to 65535" in capsys.readouterr().err
