"""What moves values and data decides alike on two processes, and as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.adapting_checks import run
from tests.distributed.pair import of_two


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path: Path) -> None:
    first, second = of_two("adapting_checks", tmp_path, timeout=300)
    assert first["weights_equal"]
    assert first == second
    one = run(1, tmp_path)
    assert first["rows"] == one["rows"]
    assert first["confidence"] == pytest.approx(one["confidence"], rel=1e-3, abs=1e-5)
    assert max(one["confidence"]) > 0
    for a, b in zip(first["values"], one["values"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert first["batch"] == pytest.approx(one["batch"], rel=1e-3, abs=1e-5)
    assert first["target"] == pytest.approx(one["target"], rel=1e-2)
    assert first["plateau"]["plateau"]["bad"] == one["plateau"]["plateau"]["bad"]
