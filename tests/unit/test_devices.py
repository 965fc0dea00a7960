"""Devices of different kinds in one job are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from alignment import devices, distributed


def test_devices_of_one_kind_are_not_worth_a_line() -> None:
    assert devices.mixture(["H100"] * 8) == ""
    assert devices.mixture(["cpu (x86_64)"]) == ""


def test_each_kind_is_named_with_its_ranks() -> None:
    line = devices.mixture(["A100", "A100", "H100", "A100"])
    assert "A100 on ranks 0, 1, 3; H100 on rank 2. " in line


def test_rank_0_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def gathered(value: Any) -> list[Any]:
        return [value, "NVIDIA H100"]

    monkeypatch.setattr(distributed, "gather_from_processes", gathered)
    for rank, lines in ((1, 0), (0, 1)):
        monkeypatch.setattr(distributed, "process", lambda rank=rank: rank)
        with caplog.at_level(logging.WARNING):
            devices.report_mixture(torch.device("cpu"))
        assert len(caplog.records) == lines
    assert "cpu (" in caplog.text
    assert "NVIDIA H100 on rank 1" in caplog.text
