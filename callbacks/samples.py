"""What the policy says at each evaluation, as a table in the tracker and a file in the run's folder."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from alignment import distributed
from alignment.errors import UserError
from alignment.folders import run_folder
from alignment.tracker_client import Client
from alignment.tracking import TrackingLogger

Row = dict[str, Any]


class Samples(Callback):
    """Sampled completions with their rewards, a few per evaluation.

    The rows are those that `validation_step` and `test_step` return: a list of mappings with `index`, `prompt`,
    `completion` and, where known, `stratum`, `tokens`, `reward` (the total), `rewards` (name -> value) and `truncated`.
    Validation goes to `samples.jsonl` in the run's folder and, with a TrackingLogger, to the table `samples.json` among
    the artifacts of the MLflow run; test to `test_samples`, `validate` by itself to `validate_samples`. They grow by
    evaluation; one that is done again replaces its rows. `step` is where the evaluation's metrics are logged, so that a
    row is found from a point of a curve. Values have six significant digits; an empty one is an abstention. The sanity
    check and `fast_dev_run` are left out.

    Args:
        rows: most rows per evaluation: completions of the first prompts in data order, the same prompts each time.
    """

    def __init__(self, rows: int = 16) -> None:
        if rows < 1:
            raise UserError(f"callbacks.Samples: rows is {rows}; use at least 1, or leave the callback out")
        self.rows = rows
        self._kept: list[Row] = []
        self._seen = False  # whether a step of this evaluation has returned rows
        self._warned: set[str] = set()

    # ------------------------------------------------------------------ collecting

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept, self._seen = [], False

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept, self._seen = [], False

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._take(outputs)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._take(outputs)

    def _take(self, outputs: Any) -> None:
        if not isinstance(outputs, list) or not all(_is_row(row) for row in outputs):
            return
        self._seen = True
        self._kept = self._first([*self._kept, *outputs])

    def _first(self, rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: int(row["index"]))[: self.rows]  # stable: a prompt's completions stay put

    # ------------------------------------------------------------------ writing

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            name = "validate_samples" if trainer.state.fn == TrainerFn.VALIDATING else "samples"
            self._write(trainer, pl_module, name, "validation_step")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module, "test_samples", "test_step")

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str, hook: str) -> None:
        """A collective. What goes wrong with the disk or the tracker is a warning: training does not depend on it."""
        parts: Any = distributed.all_gather_objects((self._seen, self._kept))
        self._kept = []
        if not any(seen for seen, _ in parts):
            self._warn(
                f"callbacks.Samples has nothing to show: {hook} of {type(pl_module).__name__} returns no rows with "
                "index, prompt and completion; leave the callback out"
            )
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = run_folder(trainer) / f"{name}.jsonl"
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # which Lightning logs the metrics at
        rows = [_record(step, row) for row in self._first(row for _, kept in parts for row in kept)]
        if not rows or not trainer.is_global_zero:
            return
        try:
            _replace(path, _merged(_read(path), rows))
        except (OSError, ValueError) as ex:
            self._warn(f"callbacks.Samples cannot write {path}: {ex}")
        for logger in trainer.loggers:
            if isinstance(logger, TrackingLogger):
                logger.record(lambda client, run_id: _log_table(client, run_id, path, rows))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(text)


# ------------------------------------------------------------------------------------------------ rows


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and {"index", "prompt", "completion"} <= row.keys()


def _record(step: int, row: Mapping[str, Any]) -> Row:
    """One line of the file: the table's columns in their order."""
    record: Row = {"step": step, "index": int(row["index"])}
    if row.get("stratum"):  # no empty column in the tracker where prompts have none
        record["stratum"] = row["stratum"]
    record |= {"prompt": row["prompt"], "completion": row["completion"]}
    if "tokens" in row:
        record["tokens"] = row["tokens"]
    record["reward"] = _rounded(row.get("reward"))
    record |= {f"rewards/{name}": _rounded(value) for name, value in row.get("rewards", {}).items()}
    return record | {"truncated": row.get("truncated")}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _merged(old: Iterable[Row], new: list[Row]) -> list[Row]:
    """By step; the new rows in place of old ones of the same evaluation."""
    steps = {row["step"] for row in new}
    return sorted([row for row in old if row["step"] not in steps] + new, key=lambda row: int(row["step"]))


# ------------------------------------------------------------------------------------------------ places


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    # Not splitlines(): JSON text may hold other line separators (U+2028) as they are.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _replace(path: Path, rows: list[Row]) -> None:
    """Write beside, then rename: whoever reads, or dies, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    partial.write_text(text, encoding="utf-8", errors="replace")
    os.replace(partial, path)


def _log_table(client: Client, run_id: str, path: Path, rows: list[Row]) -> None:
    """Put rows into the table artifact that belongs to the file `path`. Not by `client.log_table`, which can only
    append: the tracker's queue may try a call again, and a resumed run may repeat an evaluation."""
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    name = f"{path.stem}.json"
    table = _merged(_logged_rows(client, run_id, name, path), rows)
    columns = [*dict.fromkeys(c for row in table for c in row if c != "truncated"), "truncated"]
    data = [[row.get(column) for column in columns] for row in table]
    client.log_text(run_id, json.dumps({"columns": columns, "data": data}), name)
    # By this tag the UI and `load_table` know the artifact for a table.
    known = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
    entry = {"path": name, "type": "table"}
    if entry not in known:
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*known, entry]))


def _logged_rows(client: Client, run_id: str, name: str, path: Path) -> list[Row]:
    if name not in [artifact.path for artifact in client.list_artifacts(run_id)]:
        return []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(client.download_artifacts(run_id, name, dst_path=folder)).read_text(encoding="utf-8")
    try:
        table = json.loads(text)
    except ValueError:
        return _read(path)  # the process that wrote the artifact died meanwhile; the file is always whole
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
