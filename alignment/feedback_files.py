"""Feedback in files of JSON lines: one file, or those of a folder, that others append to.

A line counts once its line feed is there. Files are told apart by what was read of them, not by their names alone, so
that rotation loses nothing and repeats nothing:

    renamed                 read on under its new name: same inode, same last bytes that were read
    copied, then cut        the copy is read on, the file itself from its start
    restored, moved over    same bytes where reading stopped: read on
    cut, or other content   read from its start
    gone                    told; it is read on should it come back

The last 256 bytes that were read are what a file is recognised by.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from alignment.feedback import LINES, Place, Places, Row, Trouble

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_SPAN = 256


class FeedbackFiles:
    """Whole lines, each once; see alignment.feedback.Feedback.

    Args:
        path: a folder, whose .jsonl files are read, or one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._one = not path.is_dir()
        self._folder = path.parent if self._one else path
        self._trouble = Trouble()
        self._gone: set[str] = set()

    def check(self) -> None:
        """Nothing is wrong for ever with files that need not be there."""

    def where(self, place: Place) -> str:
        return str(self.path if self._one and place.name == self.path.name else self._folder / place.name)

    def look(self, places: Places) -> tuple[Places, int]:
        found: list[Place] = [*places]
        with self._trouble.told():
            found = [self._grown(place) for place in self._placed(places, self._files())]
        return tuple(found), sum(place.last - place.row for place in found)

    def read(self, places: Places, count: int) -> tuple[list[Row], Places]:
        rows: list[Row] = []
        after = list(places)
        with self._trouble.told():
            for i, place in enumerate(places):
                if len(rows) < count and place.open:
                    others = {other.name for other in after if other is not place}
                    more, after[i] = self._read(place, count - len(rows), others)
                    rows += more
        return rows, tuple(after)

    # ------------------------------------------------------------------ which file is which

    def _files(self) -> dict[str, int]:
        """Name -> inode of the files of the folder; none while there is no folder."""
        if not self._folder.exists():
            return {}
        with os.scandir(self._folder) as entries:
            return {entry.name: entry.inode() for entry in entries if entry.is_file()}

    def _wanted(self, name: str) -> bool:
        """Whether a new file of this name is read."""
        return name == self.path.name if self._one else name.endswith(LINES) and not name.startswith(".")

    def _placed(self, places: Places, files: Mapping[str, int]) -> list[Place]:
        """The places where their files are now, and behind them those of new files by name."""
        self._gone.difference_update(files)
        homes = [self._renamed(place, files) for place in places]
        taken = {name for name in homes if name is not None}
        found: list[Place] = []
        for place, home in zip(places, homes, strict=True):
            name = home or self._alike(place, files, taken)
            if name is not None:
                taken.add(name)
                self._tell_move(place, name)
                found.append(replace(place, name=name, inode=files[name]))
            elif place.name in files and place.name not in taken:
                taken.add(place.name)
                self._tell_new(place, files[place.name])
                found.append(Place(name=place.name, inode=files[place.name]))
            elif place.position:  # it may come back
                if place.name not in files and place.name not in self._gone:
                    self._gone.add(place.name)
                    log.warning("%s is gone; row %d is the last one read of it", self.where(place), place.row)
                found.append(place)
        fresh = sorted(name for name in files if self._wanted(name) and name not in taken)
        return found + [Place(name=name, inode=files[name]) for name in fresh]

    def _renamed(self, place: Place, files: Mapping[str, int]) -> str | None:
        """The name of the file with the inode of a place, its own before others, if it holds what was read. An inode
        may be given to another file: where nothing was read, names must begin alike."""
        names = [name for name, inode in files.items() if inode == place.inode]
        if not place.position:
            names = [name for name in names if name.startswith(Path(place.name).stem)]
        return self._first(place, names)

    def _alike(self, place: Place, files: Mapping[str, int], taken: Collection[str]) -> str | None:
        """The name of a file that holds what was read at the place, though it is another one: a copy."""
        start = self.path.stem if self._one else ""
        names = [name for name in files if name not in taken and name.startswith(start)]
        return self._first(place, names) if place.position else None

    def _first(self, place: Place, names: list[str]) -> str | None:
        names.sort(key=lambda name: (name != place.name, name))
        return next((name for name in names if self._seems(place, name)), None)

    def _seems(self, place: Place, name: str) -> bool:
        """Whether a file holds what was read, as far as is known: the place's own, if it cannot be opened now, is not
        given up for that."""
        try:
            return self._holds(place, name)
        except OSError as error:
            self._trouble.tell(f"feedback cannot be read: {error}")
            return name == place.name

    def _holds(self, place: Place, name: str) -> bool:
        with (self._folder / name).open("rb") as file:
            return file.seek(0, os.SEEK_END) >= place.position and _mark(file, place.position) == place.mark

    def _tell_move(self, place: Place, name: str) -> None:
        if name != place.name and place.position:
            log.warning("%s is %s now, and is read on behind row %d", self.where(place), name, place.row)

    def _tell_new(self, place: Place, inode: int) -> None:
        if place.position:
            what = "was cut or overwritten" if inode == place.inode else "was replaced"
            said = "it is read from its start; what it held behind that row is lost"
            log.warning("%s %s after row %d had been read: %s", self.where(place), what, place.row, said)

    # ------------------------------------------------------------------ lines

    def _grown(self, place: Place) -> Place:
        """The place with a round of all whole lines behind it."""
        path = self._folder / place.name
        try:
            if path.stat().st_size <= place.position:
                return place.withdrawn()
            with path.open("rb") as file:
                end, last = file.seek(place.position), place.row
                while chunk := file.read(_CHUNK):
                    last += chunk.count(b"\n")
                    if (at := chunk.rfind(b"\n")) >= 0:
                        end = file.tell() - len(chunk) + at + 1
        except FileNotFoundError:  # told where it was looked for
            return place.withdrawn()
        except OSError as error:
            self._trouble.tell(f"feedback cannot be read: {error}")
            return place.withdrawn()
        return replace(place, end=end, last=last)

    def _read(self, place: Place, count: int, others: Collection[str]) -> tuple[list[Row], Place]:
        try:
            # Where nothing was read yet every file holds that: the inode alone tells a new one.
            known = place.position > 0 or (self._folder / place.name).stat().st_ino == place.inode
            here = known and self._holds(place, place.name)
        except FileNotFoundError:
            here = False
        if not here:  # rotated since the look
            files = self._files()
            name = self._renamed(place, files) or self._alike(place, files, others)
            if name is None:  # the next look says what happened
                return [], place.withdrawn()
            self._tell_move(place, name)
            place = replace(place, name=name, inode=files[name])
        return self._lines(place, count)

    def _lines(self, place: Place, count: int) -> tuple[list[Row], Place]:
        prefix = "" if self._one and place.name == self.path.name else f"{place.name} "
        rows: list[Row] = []
        with (self._folder / place.name).open("rb") as file:
            position, row, end, last = file.seek(place.position), place.row, place.end, place.last
            while position < end and len(rows) < count:
                line = file.readline()
                if not line.endswith(b"\n"):  # cut since the look
                    end, last = position, row
                    break
                position, row = position + len(line), row + 1
                # Undecodable bytes become lone surrogates, which whoever reads the row finds.
                if text := line.decode("utf-8", errors="surrogateescape").strip():
                    rows.append((f"{prefix}row {row}", text))
            mark = _mark(file, position)
        return rows, replace(place, position=position, row=row, end=end, last=last, mark=mark)


def _mark(file: BinaryIO, position: int) -> str:
    """Digest of the last bytes before a position; empty at the start."""
    if not position:
        return ""
    start = max(0, position - _SPAN)
    file.seek(start)
    return hashlib.blake2b(file.read(position - start), digest_size=8).hexdigest()
