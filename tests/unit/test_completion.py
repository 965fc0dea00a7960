"""`alignment completion`: bash completes subcommands, options and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from alignment import cli, completion
from alignment.cli import SUBCOMMANDS, main


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightning-alignment"


def completed(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words; `alignment` itself is played by a function."""
    line = " ".join(f'"{word}"' for word in words)
    code = f"""{script}
alignment() {{ echo --name --note --other; }}
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _alignment; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "dpo.yaml").touch()
    assert completed(script, tmp_path, "alignment", "exp") == ["export"]
    assert set(completed(script, tmp_path, "alignment", "")) == set(SUBCOMMANDS)
    assert completed(script, tmp_path, "alignment", "fit", "--n") == ["--name", "--note"]
    assert completed(script, tmp_path, "alignment", "fit", "-c", "d") == ["dpo.yaml"]


def test_zsh_loads_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


def test_options_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "options", "doctor"]) == 0
    found = capsys.readouterr().out.split()
    assert {"--help", "--root", "--fail"} <= set(found)
    monkeypatch.setattr(cli, "main", lambda words: pytest.fail("it asked again"))
    assert completion.options("doctor") == found


def test_options_of_a_run(cache: Path) -> None:
    assert {"--config", "--model", "--trainer.max_steps", "--ckpt_path"} <= set(completion.options("fit"))


def test_no_such_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "options", "fitt"]) == 2
    assert "there is no subcommand 'fitt'" in capsys.readouterr().err
