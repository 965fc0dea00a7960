"""The doctor on two processes: it sees the same on both, and that their weights have parted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pair import of_two


@pytest.mark.slow
def test_ranks_that_part_are_found(tmp_path: Path) -> None:
    first, second = of_two("doctor_checks", tmp_path, timeout=300)
    told = first.pop("devices"), second.pop("devices")
    assert first == second  # what was measured of time included
    whole, drifted = first["whole"], first["drifted"]
    assert whole["alarms"] == []
    # what a look finds is logged with the next row, here that of the epoch's end
    assert whole["history"]["ranks/parameters_differ"]["values"] == [0.0] * 6
    assert whole["history"]["ranks/grad_norm_spread"]["values"] == [0.0] * 6
    assert drifted["history"]["ranks/parameters_differ"]["values"] == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    (alarm,) = drifted["alarms"]
    assert (alarm["rule"], alarm["until"]) == ("ranks_disagree", None)
    assert alarm["evidence"][0]["after"] == 0.5
    assert "check the all-reduce" in drifted["lines"][0]
    # devices of different kinds are told at the start of a job, once, by rank 0; those of one kind are not
    assert told[1] == [0, []]
    assert told[0][0] == 0
    (line,) = told[0][1]
    assert "A100 on rank 0; H100 on rank 1" in line
