"""Read pickles from strangers: the result is inert, and no name in the pickle is looked up.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. Here every name that a reader knows makes an object that only
keeps its arguments and its state; any other name is refused. So a pickle can run nothing, whatever it says. Afterwards
``values.py`` and ``torch_format.py`` read these objects, and check every part that they use. The classes of torch and
numpy are not handed out, as a pickle can restore their objects to states that read foreign memory.

Python's slower unpickler is used, since that in C allocates whatever sizes and numbers the pickle says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch

__all__ = ["Pickled", "PickledDict", "load_inert", "shown"]

_SHOWN = 80  # characters of something from a file in an error
# Operations that look names up elsewhere, allocate any number of bytes, or hash what may be very deep.
_REFUSED = (
    pickle.EXT1 + pickle.EXT2 + pickle.EXT4 + pickle.BYTEARRAY8
    + pickle.DICT + pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET
)  # fmt: skip


class Pickled:
    """An object in a pickle, which keeps the arguments and the state that it was made with."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Pickled:
        """Keep the arguments, both of a call and of an allocation without a call."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


class PickledDict(dict[Any, Any]):
    """A dictionary in a pickle, with its state; a subclass of it stands for an ordered one."""

    state: Any = None
    __setstate__ = Pickled.__setstate__

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an item. Keys of deeply nested tuples are refused: their hash would crash the process."""
        inner = [part for part in key if isinstance(part, tuple)] if isinstance(key, tuple) else []
        if any(isinstance(part, tuple) for each in inner for part in each):
            raise UnpicklingError("a key of tuples that are nested more than twice")
        super().__setitem__(key, value)


class _InertUnpickler(pickle._Unpickler):
    """Unpickler with a fixed set of names. See [Note: Reading a pickle without running it]."""

    dispatch: ClassVar[dict[int, Any]] = {
        **{opcode: load for opcode, load in pickle._Unpickler.dispatch.items() if opcode not in _REFUSED},
        pickle.EMPTY_DICT[0]: lambda self: self.append(PickledDict()),
    }
    names: Mapping[str, Any]

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle."""
        known = f"{module}.{name}"
        if known not in self.names:
            raise UnpicklingError(f"refers to {module[:_SHOWN]}.{name[:_SHOWN]}, which is not allowed")
        return self.names[known]

    def persistent_load(self, pid: Any) -> Any:
        """Return the stand-in for data outside of the pickle."""
        return self.find_class("", "storage")(*pid)


def load_inert(data: bytes, calls: Mapping[str, Any], constants: Mapping[str, torch.dtype | str | None]) -> Any:
    """Return the contents of a pickle, in which instances of ``Pickled`` stand for all objects that it makes.

    Args:
        data: The pickle.
        calls: The names that the pickle may call, which become the class names of the stand-ins. ".storage" stands for
            external data.
        constants: Names with the values that stand for them, which cannot be called.

    Raises:
        Exception: Any, if it is damaged, or has a name that is not allowed.
    """
    unpickler = _InertUnpickler(io.BytesIO(data))
    # New classes for every pickle: one that sets attributes of a class changes no other file.
    stand_ins: dict[str, Callable[..., Any]] = {name: type(name, (Pickled,), {}) for name in calls}
    unpickler.names = {**stand_ins, **constants, "collections.OrderedDict": type("", (PickledDict,), {})}
    return unpickler.load()


def shown(found: Any) -> str:
    """Return something from a pickle as short text; never all of it: a few bytes may stand for gigabytes of text."""
    if isinstance(found, str):
        return found[:_SHOWN]
    return str(found) if isinstance(found, int) and abs(found) < 1 << 64 else type(found).__name__
