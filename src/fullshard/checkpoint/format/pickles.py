"""Read pickles from strangers: only the few names and operations that belong there, and nothing is run.

[Note: Reading a pickle without running it]
A pickle is a program: it names callables and calls them. Here each name that a reader knows has a stand-in, a function
that checks its arguments; any other name is refused. torch's and numpy's own classes are not handed out, as a pickle
can restore them to states that read foreign memory, or change the classes. Operations that are not needed are refused,
too. Python's slower unpickler is used, since that in C allocates whatever sizes and numbers the pickle says.

A few bytes may stand for gigabytes, as an object can be in many places. So stand-ins may copy about as much as the
pickle has, and keys of dicts, which are hashed, are small.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

__all__ = ["PickledObject", "RestrictedUnpickler", "checked_key", "shown"]

_SHOWN = 80  # characters of something from a file in an error
_MOST_KEY_PARTS = 1000
_SPARE_BYTES = 1 << 16
_COPIED = (str, bytes, bytearray, list, tuple, dict)
_KEYS = (str, bytes, int, float, complex, type(None), tuple, np.generic, torch.dtype)
_OPCODES = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE
    + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT
    + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.SHORT_BINBYTES + pickle.BINBYTES
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS
    + pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD + pickle.BINPERSID
    + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE + pickle.BINGET + pickle.LONG_BINGET
)  # fmt: skip


class PickledObject:
    """Stands for an instance of a class, and keeps what it is made of and restored with."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args


class RestrictedUnpickler(pickle._Unpickler):
    """Unpickler that knows some names and some operations. See [Note: Reading a pickle without running it].

    Args:
        data: The pickle.
        names: What stands for each name, by module and name: a function, or data that cannot be called.
        storage: Returns what stands for external data, from the pickle's description of it. None: there are none.
        restore: Restores the state of an object that is no ``PickledObject``. None: there are none.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes,
        names: Mapping[tuple[str, str], Any],
        *,
        storage: Callable[[Any], Any] | None = None,
        restore: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._storage, self._restore = names, storage, restore
        self._functions = {id(known) for known in names.values() if callable(known)}
        self._left = 2 * len(data) + _SPARE_BYTES

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name in the pickle."""
        if (module, name) not in self._names:
            raise UnpicklingError(f"refers to {module[:_SHOWN]}.{name[:_SHOWN]}, which is not allowed")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the stand-in for data outside of the pickle."""
        if self._storage is None:
            raise UnpicklingError("refers to external data")
        return self._storage(pid)

    def _refuse_operation(self) -> NoReturn:
        raise UnpicklingError("has an operation that is not allowed")

    def _call(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if id(function) not in self._functions or type(args) is not tuple:
            raise UnpicklingError(f"calls an object of type {type(function).__name__}")
        self._spend(args)
        self.stack[-1] = function(*args)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif self._restore is None:
            raise UnpicklingError(f"restores the state of an object of type {type(target).__name__}")
        else:
            self._spend(state)
            self._restore(target, state)

    def _spend(self, args: Any) -> None:
        """Count what a stand-in may copy."""
        if isinstance(args, tuple):
            self._left -= sum(len(each) for each in args if isinstance(each, _COPIED))
        if self._left < 0:
            raise UnpicklingError("copies more than the file has")

    def _append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise UnpicklingError(f"appends to an object of type {type(target).__name__}")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise UnpicklingError(f"sets items of an object of type {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value

    def _pop_items(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse_operation),
        **{opcode: pickle._Unpickler.dispatch[opcode] for opcode in _OPCODES},
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: lambda self: self._append_items(self._pop_items(1)),
        pickle.APPENDS[0]: lambda self: self._append_items(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set_items(self._pop_items(2)),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
    }


def checked_key(key: Any) -> Any:
    """Return something that is to be hashed; a deep tuple would crash the process, a wide one take forever.

    Raises:
        UnpicklingError: If it is not small.
    """
    parts = [key]
    for part in parts:  # to which those of tuples are added
        if isinstance(part, tuple):
            parts.extend(part[:_MOST_KEY_PARTS])
        if not isinstance(part, (*_KEYS, PickledObject)) or len(parts) > _MOST_KEY_PARTS:
            raise UnpicklingError(f"a key of type {type(key).__name__}, or too large for one")
    return key


def shown(found: Any) -> str:
    """Return something from a pickle as short text; never all of it: a few bytes may stand for gigabytes of text."""
    if isinstance(found, str):
        return found[:_SHOWN]
    return str(found) if isinstance(found, int) and abs(found) < 1 << 64 else type(found).__name__
