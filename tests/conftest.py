"""Fixtures and guards shared by every test."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports huggingface_hub: a test never reaches for the network.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors run faster on one thread, and sums do not depend on how many cores the machine has."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _users_files_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote and imported is gone after it: the next test may write another one of that name."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _process_groups_end() -> Iterator[None]:
    """A sharded run of one process leaves its group; the next one makes its own."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", type=int, choices=(0, 1), help="every second file only, from the first or the second on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (half := config.getoption("--half")) is not None:
        files = sorted({item.path for item in items})
        kept = set(files[half::2])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
        items[:] = [item for item in items if item.path in kept]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository, with real models and data; the test is skipped where it is absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder 'shared' is not beside the repository")
    return folder


@pytest.fixture(scope="session")
def _empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and no runs: creating one takes seconds, copying it none."""
    from mlflow.tracking import MlflowClient

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}")
    return database


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _empty_database: Path) -> Path:
    """An empty working directory, made current, whose tracking database is ready; `sys.path` is restored afterwards."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(_empty_database, folder / "mlflow.db")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(REPOSITORY)])
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """The small tokenizer that `policy.name: tiny` uses."""
    from alignment.tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    """A saved tiny Llama with its tokenizer, so that the real loading code runs. Read only: shared by all tests."""
    from alignment.tiny import tiny_model

    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_model(seed=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
