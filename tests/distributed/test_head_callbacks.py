"""Callbacks that watch several rewards decide alike on two processes, and as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.head_callbacks_checks import run
from tests.distributed.pair import of_two


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path: Path) -> None:
    first, second = of_two("head_callbacks_checks", tmp_path, timeout=300)
    assert first["weights_equal"]
    for found in (first, second):
        found["place"].pop("due")
    assert first == second
    one: dict[str, Any] = run(1, tmp_path)
    one["place"].pop("due")
    for name in ("stalled", "entropy", "frozen", "bonus", "place", "global_step"):
        assert first[name] == pytest.approx(one[name]) if name == "entropy" else first[name] == one[name]
    assert first["stalled"]["same"] >= 2
    assert "same" not in first["averages"]
    assert [place["row"] for place in first["place"]["places"]] == [5]
    for name in ("averages", "rates"):
        assert first[name] == pytest.approx(one[name], rel=1e-3)
