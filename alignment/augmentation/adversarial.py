"""Adversarial rows: copies of a share of the rows with an injected attack in the prompt, and the same true task.

Which reply is right does not change: the task stands in the prompt as before, and what was injected is text that came
with it. So

    pairs                 chosen stays the answer to the task. rejected becomes the answer to the payload: what a model
                          says that gave in (SecAlign, Chen et al. 2024, arXiv 2410.05451). With `rejected: kept` it
                          stays what it was
    completions, labels   stay as they are
    prompts               every other column (answer, tests, ...) stays, so rewards go on judging the task

The payload is the last user turn of another row with another answer. Where an instruction has an `input`, the attack is
injected there: it is the part of a prompt that comes from elsewhere.

Choices are keyed by (seed, row content), so the same file and seed give the same rows, whatever their order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.augmentation.attacks import ATTACKS, attacked
from alignment.augmentation.rewriting import data_part, rewritten
from alignment.augmentation.rows import ATTACK, AUGMENTED, NONE, SOURCE_ROW, Entry, Rows, origin
from alignment.errors import UserError
from alignment.randomness import derive
from datamodules.rows import RowError

SHARE = 0.05
"""Share of adversarial rows where nobody says another."""
COLUMNS = (AUGMENTED, ATTACK, SOURCE_ROW)
_TRIES = 100  # other rows that are looked at for a payload


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig:
    """How many rows are injected, and with what.

    Args:
        share: adversarial rows as a share of all rows written, above 0 and below 1.
        attacks: kinds of attack, used equally often.
        rejected: of pairs, what the rejected reply becomes: `obeyed`, the answer to the payload, or `kept`.
        max_payload: longest payload, in characters; longer prompts are attacked but not used as payload.
        seed: of every choice.
    """

    share: float = SHARE
    attacks: Sequence[str] = field(default_factory=lambda: list(ATTACKS))
    rejected: Literal["obeyed", "kept"] = "obeyed"
    max_payload: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"--share is {self.share}; it must be above 0 and below 1, such as {SHARE}")
        unknown = [name for name in self.attacks if name not in ATTACKS]
        if unknown or not self.attacks:
            named = f"'{unknown[0]}' is no attack" if self.attacks else "--attacks names none"
            raise UserError(f"{named}; there are {', '.join(ATTACKS)}")
        if self.rejected not in ("obeyed", "kept"):
            raise UserError(f"--rejected is '{self.rejected}'; use obeyed or kept")
        if self.max_payload < 1:
            raise UserError(f"--max_payload is {self.max_payload}; a payload has at least 1 character")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """What came of it.

    Args:
        rows: everything to write: each row of the file, and behind it the adversarial ones made of it.
        counts: adversarial rows by kind of attack, and how many rows could not be attacked by reason.
    """

    rows: list[dict[str, Any]]
    counts: dict[str, int]


def inject(rows: Rows, config: AdversarialConfig) -> Injected:
    """Add adversarial rows, the nearest whole number to `share` of all that are then written.

    Raises UserError for a file without prompts, with too few rows for one adversarial row, with fewer attackable rows
    than are wanted, or whose margins would be of a reply that is replaced.
    """
    _check(rows, config)
    firsts: dict[str, Entry] = {}
    for entry in rows.entries:
        if entry.original and entry.asked.strip():
            firsts.setdefault(_content(entry), entry)
    there = sum((entry.values.get(ATTACK) or NONE) != NONE for entry in rows.entries)
    wanted = _wanted(len(rows.entries), config.share, there)
    order = [firsts[content] for content in sorted(firsts, key=lambda c: derive(config.seed, "attacked row", c))]
    donors = _Donors(order, config)
    extra: dict[int, dict[str, Any]] = {}
    counts: Counter[str] = Counter({name: 0 for name in config.attacks})
    for entry in order:
        if len(extra) == wanted:
            break
        kind = config.attacks[len(extra) % len(config.attacks)]
        found = _attack(rows, entry, kind, donors, config)
        if found is None:
            counts["rows without a fitting payload"] += 1
            continue
        extra[entry.number] = found
        counts[kind] += 1
    if len(extra) < wanted:
        raise UserError(
            f"--share {config.share:g} asks for {wanted} adversarial rows, and only {len(extra)} of '{rows.path}' can "
            "be attacked (a row needs a prompt, and another row with another prompt and answer); lower --share, or "
            "raise --max_payload"
        )
    written = []
    for entry in rows.entries:
        written.append(marked(entry))
        if entry.number in extra:
            written.append(extra[entry.number])
    return Injected(rows=written, counts=dict(counts))


def marked(entry: Entry) -> dict[str, Any]:
    """A row as it was, with the columns that tell it from injected ones; marks of an earlier augmentation stay."""
    values = dict(entry.values)
    marks = {AUGMENTED: not entry.original, ATTACK: values.get(ATTACK) or NONE, SOURCE_ROW: origin(entry)}
    return values | marks


def _check(rows: Rows, config: AdversarialConfig) -> None:
    rows.check_new_columns(COLUMNS)
    if not any(entry.asked.strip() for entry in rows.entries):
        raise UserError(
            f"'{rows.path}' is read as {rows.format}, which has no prompt to attack; with texts to be continued give "
            "--purpose prompts"
        )
    if rows.purpose == "preference" and config.rejected == "obeyed" and "margin" in rows.known:
        raise UserError(
            f"'{rows.path}' has margins, which would be wrong for another rejected reply; give --rejected kept, or "
            "drop the column"
        )


def _wanted(rows: int, share: float, there: int) -> int:
    """Adversarial rows to add to `rows`, of which `there` are adversarial already: the whole number with which their
    share of all is nearest to `share`."""
    exact = (share * rows - there) / (1 - share)
    wanted = math.floor(exact + 0.5)
    if wanted < 1:
        need = math.ceil(0.5 * (1 - share) / share)
        raise UserError(
            f"{share:.2%} of {rows} rows, {there} of them adversarial already, is no further row"
            + (f"; at least {need} rows are needed" if rows < need else "; raise --share")
        )
    return wanted


class _Donors:
    """Rows whose task can be a payload, in the keyed order."""

    def __init__(self, order: Sequence[Entry], config: AdversarialConfig) -> None:
        self._entries = [entry for entry in order if len(entry.asked) <= config.max_payload]
        self._seed = config.seed

    def of(self, entry: Entry) -> Sequence[Entry]:
        """Candidates for the payload in `entry`, best first: other prompts, from a place of the entry's own on."""
        if not self._entries:
            return []
        start = derive(self._seed, "payload", _content(entry)) % len(self._entries)
        turned = self._entries[start : start + _TRIES]
        turned += self._entries[: max(0, min(start, _TRIES - len(turned)))]
        return [other for other in turned if other.prompt_key != entry.prompt_key]


def _attack(rows: Rows, entry: Entry, kind: str, donors: _Donors, config: AdversarialConfig) -> dict[str, Any] | None:
    """The attacked copy of a row; None where no other row gives a payload that the format can hold."""
    texts = ATTACKS[kind]
    template = texts[derive(config.seed, "attack text", kind, _content(entry)) % len(texts)]
    before, task = data_part(rows, entry)
    for donor in donors.of(entry):
        obeyed = donor.row.completions[0] if donor.row.completions else None
        if obeyed is not None and obeyed.strip() == entry.row.completions[0].strip():
            continue  # obeying and not obeying would be the same
        rejected = obeyed if rows.purpose == "preference" and config.rejected == "obeyed" else None
        prompt = before + attacked(template, task, donor.asked.strip())
        try:
            values, _ = rewritten(rows, entry, prompt=prompt, rejected=rejected)
        except RowError:
            continue
        return values | {AUGMENTED: True, ATTACK: kind, SOURCE_ROW: origin(entry)}
    return None


def _content(entry: Entry) -> str:
    """Digest of a row's values, without what an earlier augmentation has written."""
    values: Mapping[str, Any] = {k: v for k, v in entry.values.items() if k not in COLUMNS}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
