"""`python -m benchmarks.performance.peers VERSION`: TRL in a virtual environment of its own, made on first use."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(".cache/peers")
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
BESIDE = ("transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "requests")
"""Packages a peer gets in the versions that ours runs with, so that only the trainer differs. 1.12.0 imports requests
for its GRPO and does not ask for it."""
VERSIONS = ("1.16.0", "1.12.0")
"""1.12.0 is the last one with a PPO trainer."""
READY = "installed.txt"


def pinned(packages: tuple[str, ...], constraints: Path = CONSTRAINTS) -> list[str]:
    """`name==version` of each package, as constraints.txt has them."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    found = {line.partition("==")[0].lower(): line.strip() for line in lines if "==" in line}
    return [found[package] for package in packages]


def python(version: str, root: Path = ROOT) -> Path:
    """Interpreter of the environment that has `trl==version`; made when it is not there yet, which takes minutes."""
    folder = (root / f"trl-{version}").resolve()
    interpreter = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = [f"trl=={version}", *pinned(BESIDE)]
    with FileLock(f"{folder}.lock"):
        if not (folder / READY).exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            # torch goes first and alone, as in the Makefile: pip then takes the build that the index offers.
            _install(interpreter, *pinned(("torch",)))
        if not (folder / READY).exists() or (folder / READY).read_text().split() != wanted:
            _install(interpreter, *wanted)
            (folder / READY).write_text("\n".join(wanted) + "\n")
    return interpreter


def _install(interpreter: Path, *packages: str) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance.peers", description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(argv)
    for version in options.versions:
        print(python(version, options.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
