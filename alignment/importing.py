"""Importing much at once, and what can wait."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """For a block that imports: what imports make stays, and to look through it again and again for garbage, as Python
    does while objects pile up, takes a tenth of the time. What is there at the end is not looked through later either,
    if the block has imported anything."""
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) != before:
            gc.freeze()
        if collects:
            gc.enable()


class Later(ModuleType):
    """Stands for a module that is imported when something of it is asked for.

    Args:
        name: of the module. known: attributes that are answered without it.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in ("__path__", "__all__"):
            raise AttributeError(attribute)  # `inspect` asks every module for its file
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            try:
                module = importlib.import_module(self.__name__)
            except BaseException:
                sys.modules[self.__name__] = self  # as before; the next one may have better luck
                raise
            above, _, last = self.__name__.rpartition(".")
            setattr(sys.modules[above], last, module)
        return getattr(sys.modules[self.__name__], attribute)


def signal_later() -> None:
    """Have scipy.signal imported when it is used. torchmetrics imports it, 0.4 s, to add one function that scipy has
    moved, for a package of audio that few have; whoever uses scipy.signal gets the module itself."""
    name = "scipy.signal"
    if name in sys.modules or importlib.util.find_spec("scipy") is None:
        return

    def hamming(*args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("scipy.signal.windows").hamming(*args, **kwargs)

    sys.modules[name] = Later(name, {"hamming": hamming})
