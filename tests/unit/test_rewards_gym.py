"""Scorers of reasoning-gym, and what an answer written by a model may make them do: nothing."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from alignment.errors import UserError
from alignment.rewards.gym import EVALUATING, PARSING, ReasoningGym, is_formula, plain_value

reasoning_gym = pytest.importorskip("reasoning_gym")


def entry(task: str, **settings: Any) -> dict[str, Any]:
    return reasoning_gym.create_dataset(task, size=1, seed=3, **settings)[0]


def answered(text: object) -> str:
    return f"Let me think. <answer> {text} </answer>"


@pytest.mark.parametrize("task", ["products", "gcd", "chain_sum", "spiral_matrix", "n_queens", "number_sorting"])
def test_the_right_answer_scores_one(task: str) -> None:
    row = entry(task)
    reward = ReasoningGym()
    assert reward(answered(row["answer"]), row) == 1.0
    assert reward(answered("nonsense"), row) < 1.0
    assert reward("no answer at all", row) < 1.0


def test_metadata_may_be_json_and_the_answer_untagged() -> None:
    row = entry("gcd")
    stored = {"answer": row["answer"], "metadata": json.dumps(row["metadata"])}
    assert ReasoningGym(extract="all")(row["answer"], stored) == 1.0
    assert ReasoningGym(extract="number")(f"It is {row['answer']}, surely.", stored) == 1.0


def test_a_place_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UserError, match="extract is 'last'; use all, tag, boxed, number"):
        ReasoningGym(extract="last")  # type: ignore[arg-type]


def test_settings_reach_the_scorer() -> None:
    """puzzle24 refuses numbers below its min_value, 1 unless set."""
    row = entry("puzzle24")
    assert ReasoningGym()(answered("2 * 2 * 6 * 1"), row) == 1.0
    assert ReasoningGym(settings={"puzzle24": {"min_value": 2}})(answered("2 * 2 * 6 * 1"), row) == 0.01


def test_unknown_tasks() -> None:
    with pytest.raises(UserError, match="no task 'productz'"):
        ReasoningGym(settings={"productz": {}})
    with pytest.raises(ValueError, match="no task 'productz'"):
        ReasoningGym()("x", {"answer": "1", "metadata": {"source_dataset": "productz"}})


# -------------------------------------------------------------------------------------------------------- safety


def names_called(tree: ast.AST) -> set[str]:
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return {f.id if isinstance(f, ast.Name) else f.attr for f in calls if isinstance(f, ast.Name | ast.Attribute)}


def scorers(modules: list[Path], wanted: set[str]) -> set[str]:
    """Files whose scoring code, or what it may call in the same file, calls one of the wanted names."""
    found = set()
    for path in modules:
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in wanted):
            continue
        tree = ast.parse(text)
        functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        todo, seen = ["score_answer"], set()
        while todo:
            name = todo.pop()
            if name in functions and name not in seen:
                seen.add(name)
                called = names_called(functions[name])
                todo += called
                if called & wanted:
                    found.add(path.stem)
    return found


def test_every_scorer_that_evaluates_is_known() -> None:
    """Fails when a release of reasoning-gym adds one: look at it, then list it."""
    modules = [p for p in Path(reasoning_gym.__file__).parent.rglob("*.py") if "contrib" not in p.parts]
    assert scorers(modules, {"eval", "exec", "compile", "__import__"}) == set(EVALUATING)
    # propositional_logic has a parser of its own under that name.
    assert scorers(modules, {"parse_expr", "sympify", "S"}) - {"propositional_logic"} == set(PARSING)


@pytest.mark.parametrize("task", [*EVALUATING, *PARSING])
@pytest.mark.parametrize("form", ["open({!r}, 'w')", "[open({!r}, 'w')]", "1 + len([open({!r}, 'w')])"])
def test_an_answer_cannot_run_code(task: str, form: str, tmp_path: Path) -> None:
    target = tmp_path / "written"
    row = entry(task)
    assert ReasoningGym()(answered(form.format(str(target))), row) < 0.1
    assert not target.exists()


def test_the_scorers_alone_would_run_it(tmp_path: Path) -> None:
    """What the two tests above guard against."""
    for number, task in enumerate(("spiral_matrix", "countdown")):
        target = tmp_path / str(number)
        data = reasoning_gym.create_dataset(task, size=1, seed=3)
        data.score_answer(f"[open({str(target)!r}, 'w')]", data[0])
        assert target.exists()


def test_answers_that_the_scorers_read() -> None:
    """Lists, arithmetic and formulas still count."""
    row = entry("spiral_matrix")
    listed = "[" + ", ".join(row["answer"].split()) + "]"
    assert ReasoningGym()(answered(listed), row) == 0.1
    row = entry("simple_integration")
    assert ReasoningGym()(answered(row["answer"]), row) == 1.0
    row = entry("bitwise_arithmetic")
    assert ReasoningGym()(answered(row["answer"]), row) == 1.0
    row = {"answer": "", "metadata": {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 20}}
    assert ReasoningGym()(answered("(2 + 3) * 4"), row) == 1.0
    assert ReasoningGym()(answered("(2 + 3) * 4.real"), row) == 0.01


def test_plain_values() -> None:
    assert plain_value("[[1, -2], ['a', None]]") == [[1, -2], ["a", None]]
    assert plain_value("((0x3a + 4) << 1)") == 124
    for text in ("f()", "a", "[x for x in (1,)]", "(1).real", "'a'[0]", "lambda: 1", "1 if 1 else 2", "", "("):
        with pytest.raises(ValueError, match="not a literal"):
            plain_value(text)


def test_formulas() -> None:
    for text in ("x**2/2 + C", "-3*log(x) + exp(2*x)/7", "1.5e3", "sqrt(Abs(y))*pi"):
        assert is_formula(text)
    for text in (
        "x.func",
        "x[0]",
        "eval('1')",
        "open(x)",
        "'a'",
        "xy",
        "exp(x, evaluate=x)",
        "(x)(x)",
        "1; 2",
        "(" * 500,
    ):
        assert not is_formula(text)
