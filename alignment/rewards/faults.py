"""Counting the faults of rewards over the last batches, and stopping a run that learns from too little."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from alignment.rewards.protocol import Outcome, RewardsFailing, SuiteConfig

log = logging.getLogger(__name__)

ADVICE = {
    "timeout": "raise its timeout_s, or make it faster",
    "memory": "raise memory_mb of the suite",
    "length": "return one value per completion",
    "type": "return numbers, or None to abstain",
    "load": "make sure that it can be imported again at any time",
}


class FaultHistory:
    """Per reward, (completions lost to faults, completions scored) of the last `fault_window` batches of all ranks."""

    def __init__(self, names: Sequence[str], config: SuiteConfig) -> None:
        self._config = config
        self._window: dict[str, deque[tuple[int, int]]] = {n: deque(maxlen=config.fault_window) for n in names}
        self._kinds: dict[str, Counter[str]] = {n: Counter() for n in names}
        self._last: dict[str, Outcome] = {}
        self._told: set[tuple[str, str]] = set()

    def note(self, name: str, outcomes: Sequence[Outcome]) -> Counter[str]:
        """Count this batch's faults by kind; the first of each kind is logged."""
        counts: Counter[str] = Counter()
        for row, outcome in enumerate(outcomes):
            if outcome.kind is None:
                continue
            counts[outcome.kind] += 1
            self._last[name] = outcome
            if (name, outcome.kind) not in self._told:
                self._told.add((name, outcome.kind))
                log.warning(
                    "reward '%s' abstains on completion %d of a batch, %s: %s (later ones are only counted)",
                    *(name, row, outcome.kind, outcome.message),
                )
        self._kinds[name] += counts
        return counts

    def advance(self, batch: Mapping[str, tuple[int, int]]) -> None:
        """Add a batch's (lost, scored), agreed by ranks. Raises RewardsFailing when a full window lost too many."""
        for name, (lost, scored) in batch.items():
            window = self._window[name]
            window.append((lost, scored))
            lost, scored = sum(a for a, _ in window), sum(b for _, b in window)
            if len(window) == self._config.fault_window and lost > self._config.fault_limit * scored:
                raise RewardsFailing(
                    f"reward '{name}' failed to give a value for {lost / scored:.0%} of {scored} completions over the "
                    f"last {len(window)} batches (limit {self._config.fault_limit:.0%}); {self._diagnosis(name)}"
                )

    def stop_at_first(self, batch: Mapping[str, tuple[int, int]]) -> None:
        """Raise RewardsFailing for any fault."""
        for name, (lost, scored) in batch.items():
            if lost:
                raise RewardsFailing(f"reward '{name}' failed for {lost} of {scored}; {self._diagnosis(name)}")

    def _diagnosis(self, name: str) -> str:
        if name not in self._last:
            return "see the log of the other ranks"
        kinds = ", ".join(f"{kind} {n}" for kind, n in self._kinds[name].most_common())
        last = self._last[name]
        assert last.kind is not None
        advice = ADVICE.get(last.kind, "repair it, or let it return None where it has no opinion")
        return f"faults so far: {kinds}; the last: {last.message}; {advice}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": {name: [list(pair) for pair in window] for name, window in self._window.items()},
            "kinds": {name: dict(kinds) for name, kinds in self._kinds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rewards that are no longer there are forgotten, new ones start anew."""
        for name in self._window:
            self._window[name].extend((int(a), int(b)) for a, b in state["window"].get(name, []))
            self._kinds[name].update(state["kinds"].get(name, {}))
