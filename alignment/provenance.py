"""Which code ran: the git commit, whether the tree was changed, and the versions of what it stands on."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from alignment import __version__

PACKAGES = ("lightning", "torch", "transformers", "datasets", "peft", "bitsandbytes", "mlflow")
_GIT_SECONDS = 5


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None  # no git, no repository, or one too slow to ask: the version is simply not known
    return done.stdout.strip()


def code_version(folder: Path | None = None) -> dict[str, str]:
    """Tags `git.commit` and `git.dirty` of `folder` (default: where this package lies); empty outside a repository."""
    folder = folder or Path(__file__).resolve().parents[1]
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return {}
    return {"git.commit": commit, "git.dirty": str(bool(changes)).lower()}


def package_versions() -> dict[str, str]:
    """Tags `version.<package>` for Python and the packages that shape a run."""
    versions = {"version.python": platform.python_version(), "version.lightning-alignment": __version__}
    for name in PACKAGES:
        versions[f"version.{name}"] = version(name)
    return versions
