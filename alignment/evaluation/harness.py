"""Public benchmarks, by lm-eval."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.evaluation.base import Result, Subject


class LmEval:
    """Tasks of lm-eval (Gao et al.), on the model as it would be exported.

    Metrics: `<task>/<metric>` as lm-eval names them; intervals from its standard errors.

    Args:
        tasks: their names. shots: examples before each question; null: the task's own.
        limit: questions of each task; null: all. batch_size: rows at a time.
        include: folder of task files of your own.
    """

    def __init__(
        self,
        tasks: list[str],
        shots: int | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        include: str | None = None,
    ) -> None:
        self.tasks, self.shots, self.limit, self.batch_size, self.include = tasks, shots, limit, batch_size, include

    def run(self, subject: Subject) -> Result:
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise UserError("LmEval needs lm-eval: pip install 'lightning-alignment[eval]'") from error
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "model"
            subject.policy.model.save_pretrained(place)
            subject.policy.tokenizer.save_pretrained(place)
            manager = TaskManager(include_path=self.include)
            if unknown := [task for task in self.tasks if task not in manager.all_tasks]:
                raise UserError(f"lm-eval knows no task '{unknown[0]}'")
            found = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(place), "dtype": "auto"},
                tasks=self.tasks,
                num_fewshot=self.shots,
                limit=self.limit,
                batch_size=self.batch_size,
                device=str(subject.policy.model.device),
                task_manager=manager,
                random_seed=subject.seed,
                bootstrap_iters=0,
            )
        return _result(found["results"])


def _result(found: dict[str, dict[str, Any]]) -> Result:
    metrics, intervals = {}, {}
    for task, values in found.items():
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if not isinstance(value, int | float) or name.endswith("_stderr"):
                continue
            label = f"{task}/{name}" if kind in ("", "none") else f"{task}/{name}/{kind}"
            metrics[label] = float(value)
            error = values.get(f"{name}_stderr,{kind}")
            if isinstance(error, int | float):
                intervals[label] = (value - 1.96 * error, value + 1.96 * error)
    return Result(metrics=metrics, intervals=intervals)
