"""Scorers of the tasks of `reasoning-gym` (extra `rewards`), made safe for answers that a model wrote.

Some of its scorers pass the answer to Python's `eval` or to sympy's parser, which evaluates too: an answer could run
any code. Here an answer reaches `eval` only as a literal or plain arithmetic, and sympy only as an expression of
numbers, single letters and elementary functions. Anything else gets what the scorer gives to an answer it cannot read.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from alignment.errors import UserError
from alignment.rewards.extra import needed
from alignment.rewards.match import Extract, answer_in, check_extract

EVALUATING = ("binary_matrix", "bitwise_arithmetic", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")
"""Tasks whose scorer calls `eval`."""
PARSING = (*("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),)
"""Tasks whose scorer parses the answer with sympy."""

_PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load),
    *(ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator),
)
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
        *("exp", "log", "ln", "sqrt", "Abs", "pi", "E"),
    )
)


class Task(Protocol):
    """A generator of reasoning-gym, as far as scoring goes."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class ReasoningGym:
    """The task's own score of the answer, usually from 0 to 1.

    The row's columns: `answer`, `metadata` (a mapping or its JSON, with `source_dataset`), and `question` if the task's
    scorer looks at it.

    Args:
        extract, tag: where in the completion the answer is; see ExactMatch.
        settings: task -> settings of its generator, for the scorers that depend on them (`decimal_arithmetic`,
            `polynomial_equations`, `puzzle24`, `time_intervals`).
    """

    needs_columns = ("answer", "metadata")

    def __init__(
        self, extract: Extract = "tag", tag: str = "answer", settings: dict[str, dict[str, Any]] | None = None
    ) -> None:
        check_extract(extract)
        factory = needed("reasoning_gym.factory", "reasoning-gym")
        self._known, self._create = frozenset(factory.DATASETS), factory.create_dataset
        self._settings = settings or {}
        self._tasks: dict[str, Task] = {}
        self.extract, self.tag = extract, tag
        if unknown := sorted(set(self._settings) - self._known):
            raise UserError(f"reasoning-gym has no task '{unknown[0]}'")

    def __call__(self, completion: str, columns: Mapping[str, Any]) -> float:
        metadata = columns["metadata"]
        metadata = json.loads(metadata) if isinstance(metadata, str) else dict(metadata)
        name = metadata["source_dataset"]
        entry = {"question": columns.get("question"), "answer": columns["answer"], "metadata": metadata}
        answer = answer_in(completion, self.extract, self.tag)
        if name in PARSING and answer is not None and not is_formula(answer):
            answer = ""  # which the scorers cannot parse either
        task = self._task(name)
        with _careful_eval(sys.modules[type(task).__module__]):
            return task.score_answer(answer, entry)

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            if name not in self._known:
                raise ValueError(f"reasoning-gym has no task '{name}'")
            task: Task = self._create(name, **self._settings.get(name, {}))
            self._tasks[name] = task
        return self._tasks[name]


@contextmanager
def _careful_eval(module: ModuleType) -> Iterator[None]:
    """Within, `eval` means `plain_value` in the code of `module`."""
    vars(module)["eval"] = plain_value
    try:
        yield
    finally:
        del vars(module)["eval"]


def plain_value(text: str) -> Any:
    """The value of a Python literal or of arithmetic on literals. Raises ValueError for anything else."""
    tree = _parsed(text)
    if tree is None or not all(isinstance(node, _PLAIN) for node in ast.walk(tree)):
        raise ValueError("not a literal")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def is_formula(text: str) -> bool:
    """Whether a text is numbers, single letters, elementary functions and operators, and nothing else."""
    tree = _parsed(text)
    return tree is not None and all(_is_formula_node(node) for node in ast.walk(tree))


def _is_formula_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return isinstance(node, ast.Expression | ast.UnaryOp | ast.BinOp | ast.unaryop | ast.operator | ast.Load)


def _parsed(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None
