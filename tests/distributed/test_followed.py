"""Rows that arrive are the same on two processes, of which one reads, and as in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.followed_checks import run, write_rows
from tests.distributed.pair import of_two


@pytest.mark.slow
def test_two_processes_see_the_same_rows(tmp_path: Path) -> None:
    write_rows(2, tmp_path)
    first, second = of_two("followed_checks", tmp_path, timeout=300)
    assert first["weights_equal"]
    assert first == second
    write_rows(1, tmp_path)
    one = run(1, tmp_path)
    assert first["loss"] == pytest.approx(one.pop("loss"), rel=1e-4)
    assert {name: first[name] for name in one} == one
    assert one["read"] == [13]
    assert sum(one["used"].values()) == 12
