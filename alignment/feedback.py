"""A file of JSON lines that somebody else appends to, read in rounds: at each interval the lines that have arrived."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

log = logging.getLogger(__name__)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where reading stands.

    Args:
        position, row: bytes and lines read so far.
        end, last: where the lines of this round end, in bytes and in lines. No round is under way when that has been
            reached.
        due: when the next round begins, in seconds of the clock. None: at once.
    """

    position: int = 0
    row: int = 0
    end: int = 0
    last: int = 0
    due: float | None = None


class FeedbackFile:
    """Reads whole lines, each once. A disk that cannot be read is told in the log, and tried again at the next call.

    Args:
        path: need not exist yet. every: seconds from one round to the next.
    """

    def __init__(self, path: Path, every: float) -> None:
        self.path, self.every = path, every
        self._told = ""

    def begin(self, place: Place, now: float) -> Place:
        """The place with a round under way, if one is or if it is time for one and lines have arrived. A line without
        its end has not arrived yet; a file that has become shorter is read from its start."""
        early = place.due is not None and now < place.due <= now + self.every  # a later one: the clock was put back
        if place.position < place.end or early:
            return place
        try:
            place = self._arrived(place)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._tell(error)
        return replace(place, due=now + self.every)

    def read(self, place: Place, count: int) -> tuple[list[tuple[str, str]], Place]:
        """(at most `count` lines of the round that are not blank, each as (row number, text); the place behind
        them)."""
        lines: list[tuple[str, str]] = []
        if place.position == place.end:
            return lines, place
        position, row = place.position, place.row
        try:
            with self.path.open("rb") as file:
                file.seek(position)
                while position < place.end and len(lines) < count:
                    line = file.readline()
                    if not line:  # it has become shorter
                        position = place.end
                        break
                    position, row = position + len(line), row + 1
                    # Undecodable bytes become lone surrogates, which whoever reads the row finds.
                    if text := line.decode("utf-8", errors="surrogateescape").strip():
                        lines.append((f"row {row}", text))
        except OSError as error:
            self._tell(error)
            return [], place
        self._told = ""
        return lines, replace(place, position=position, row=row)

    def _arrived(self, place: Place) -> Place:
        with self.path.open("rb") as file:
            if file.seek(0, 2) < place.position:
                place = replace(place, position=0, row=0)
            end, last = file.seek(place.position), place.row
            while chunk := file.read(_CHUNK):
                last += chunk.count(b"\n")
                if (at := chunk.rfind(b"\n")) >= 0:
                    end = file.tell() - len(chunk) + at + 1
        return replace(place, end=end, last=last)

    def _tell(self, error: OSError) -> None:
        if str(error) != self._told:
            log.warning("feedback cannot be read: %s", error)
        self._told = str(error)
