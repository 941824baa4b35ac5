"""Pickles that attack whoever reads them, by name and from a generator, and a process in which they are read.

    PYTHONPATH=src:tests python -m checkpoint.hostile_pickles COUNT [SEED]

reads all that have names and ``COUNT`` random ones, as a value, as a shard and as ``.metadata``. It ends with an error
if one of them is not refused with a short CheckpointError, and is not plain data either. One that crashes the
process shows by the exit code.
"""

from __future__ import annotations

import io
import pickle
import random
import resource
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.contents import torch_saved
from fullshard import CheckpointError
from fullshard.checkpoint.format.files import Folder
from fullshard.checkpoint.format.torch_format import decode_shard, read_metadata
from fullshard.checkpoint.format.values import from_bytes

MEMORY = 1 << 30  # bytes that a process may allocate while it reads
GROWTH = 1 << 18  # kilobytes by which it may grow
STORAGE = bytes(range(16))  # the record data/0
HUGE = 1 << 40


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{last}\n".encode()


def group(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def call(path: str, *args: bytes) -> bytes:
    return name(path) + group(*args) + pickle.REDUCE


def built(what: bytes, *state: bytes) -> bytes:
    return what + group(*state) + pickle.BUILD


def data(value: bytes) -> bytes:
    return call("_codecs.encode", text(value.decode("latin1")), text("latin1"))


def dtype(kind: str, order: str = "<", *rest: bytes) -> bytes:
    more = rest or (pickle.NONE, pickle.NONE, pickle.NONE, number(-1), number(-1), number(0))
    return built(call("numpy.dtype", text(kind), pickle.NEWFALSE, pickle.NEWTRUE), number(3), text(order), *more)


def array(kind: bytes, shape: bytes, content: bytes) -> bytes:
    made = call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), group(number(0)), data(b"b"))
    return built(made, number(1), shape, kind, pickle.NEWFALSE, content)


def storage(kind: str = "torch.FloatStorage", key: str = "0", numel: int = 4) -> bytes:
    return group(text("storage"), name(kind), text(key), text("cpu"), number(numel)) + pickle.BINPERSID


def tensor(offset: int, size: Iterable[int], stride: Iterable[int], of: bytes = b"") -> bytes:
    places = (group(*map(number, each)) for each in (size, stride))
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", of or storage(), number(offset), *places, pickle.NEWFALSE, hooks)


def as_key(key: bytes) -> bytes:
    return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM


def nested(count: int) -> bytes:
    return pickle.EMPTY_TUPLE + pickle.TUPLE1 * count


FIELDS = (
    pickle.EMPTY_DICT
    + text("f")
    + group(call("numpy.dtype", text("O8"), pickle.NEWFALSE, pickle.NEWTRUE), number(0))
    + pickle.SETITEM
)
VOID = dtype("V8", "|", pickle.NONE, group(text("f")), FIELDS, number(8), number(1), number(0))
ATTACKS: dict[str, bytes] = {
    "array of objects": array(dtype("O8", "|"), group(number(1)), data(b"\x41" * 8)),
    "array of structures": array(VOID, group(number(1)), data(b"\x41" * 8)),
    "structure": call("numpy._core.multiarray.scalar", VOID, data(b"\x41" * 8)),
    "number of other bytes": call("numpy._core.multiarray.scalar", dtype("f8"), data(b"abc")),
    "text that is none": array(dtype("U1"), group(number(1)), data(b"\xff" * 4)),
    "array without its bytes": array(dtype("f8"), group(number(HUGE)), data(b"")),
    "array of negative size": array(dtype("f8"), group(number(-2)), data(b"\x41" * 8)),
    "tensor beyond its storage": tensor(0, [5], [1]),
    "tensor behind its storage": tensor(4, [1], [1]),
    "tensor before its storage": tensor(-1, [1], [1]),
    "backwards": tensor(0, [4], [-1]),
    "huge": tensor(0, [HUGE], [1]),
    "huge without strides": tensor(0, [HUGE], [0]),
    "sizes that overflow": tensor(0, [1 << 62, 1 << 62], [4, 1]),
    "strides that overflow": tensor(0, [2, 2], [1 << 63, 1 << 63]),
    "storage without bytes": tensor(0, [HUGE], [1], storage(numel=HUGE)),
    "storage of another size": tensor(0, [2], [1], storage("torch.DoubleStorage")),
    "storage that is missing": tensor(0, [2], [1], storage(key="1")),
    "storage of no name": tensor(0, [2], [1], storage(key="../0")),
    "quantized": tensor(0, [16], [1], storage("torch.QUInt8Storage", numel=16)),
    "bytes of a size": call("builtins.bytearray", number(HUGE)),
    "codec": call("_codecs.encode", text("a" * 100), text("bz2")),
    "extension": pickle.EXT1 + b"\1",
    "instance": pickle.MARK + pickle.INST + b"os\nsystem\n",
    "long integer": pickle.LONG4 + (1 << 30).to_bytes(4, "little") + b"\1",
    "long bytes": pickle.BINBYTES8 + HUGE.to_bytes(8, "little") + b"a",
    "long text": pickle.BINUNICODE + b"\xff" * 4 + b"a",
    "long frame": pickle.FRAME + HUGE.to_bytes(8, "little"),
    "large memo": pickle.NONE + pickle.LONG_BINPUT + (1 << 29).to_bytes(4, "little"),
    "long array of bytes": pickle.BYTEARRAY8 + HUGE.to_bytes(8, "little") + b"a",
    "deep key": as_key(nested(3 * 10**5)),
    "deep element": call("builtins.set", pickle.EMPTY_LIST + nested(3 * 10**5) + pickle.APPEND),
    "set of a deep element": pickle.EMPTY_SET + pickle.MARK + nested(3 * 10**5) + pickle.ADDITEMS,
    "deep tuple": nested(3 * 10**5),
    "deep list": pickle.EMPTY_LIST * 10**5 + pickle.APPEND * (10**5 - 1),
    "a list in itself": pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.APPEND,
    "nothing": b"",
    "no mark": pickle.TUPLE,
    "an endless text of no end": text("x" * 10**6) + pickle.REDUCE,
}
DCP = "torch.distributed.checkpoint"
NAMES = [
    *("collections.OrderedDict", "_codecs.encode", "builtins.set", "builtins.bytearray", "torch.Size", "torch.device"),
    *("torch.float32", "torch.uint16", "torch.FloatStorage", "torch.storage.UntypedStorage", "torch.FloatTensor"),
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.nn.parameter.Parameter"),
    *("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    *(f"{DCP}.metadata.{each}" for each in ("Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata")),
    *(f"{DCP}.metadata.TensorStorageMetadata", f"{DCP}.filesystem._StorageInfo"),
]
PARTS = [  # what random pickles are put together from; later ones need something on the stack
    *(number(each) for each in (0, 1, 2, 4, 16, 1 << 31, 1 << 62, HUGE, -1)),
    *(pickle.NONE, pickle.NEWTRUE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, storage(), dtype("f4")),
    *(
        text(each)
        for each in ("", "latin1", "storage", "cpu", "0", "f8", "O8", "V8", "state_dict_metadata", "_metadata")
    ),
    *(data(bytes(count)) for count in (0, 1, 4, 8)),
    *(tensor(0, [2, 2], [2, 1]), array(dtype("f4"), group(number(2)), data(b"12345678"))),
    *(name(each) for each in NAMES),
    *(pickle.MARK, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.REDUCE, pickle.NEWOBJ) * 3,
    *(pickle.BUILD, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BINPERSID) * 3,
    *(pickle.MEMOIZE, pickle.BINGET + b"\0", pickle.BINGET + b"\1", pickle.BINPUT + b"\1", pickle.POP, pickle.DUP),
]


def wrapped(program: bytes, content: bytes = STORAGE) -> bytes:
    """A file of ``torch.save`` with this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", content)
    return stream.getvalue()


def good() -> list[bytes]:
    """Pickles of everything that a value may have."""
    values = [np.arange(4.0), np.float32(2), np.array(["a", "bc"]), {"a": {1, 2}, (1, 2): b"xyz"}, random.getstate()]
    values += [Counter("aab"), OrderedDict(a=1j), torch.Size([2]), torch.device("cpu"), torch.int8, bytearray(b"abc")]
    values += [torch.zeros(2, 2), torch.zeros(8, dtype=torch.uint16), torch.nn.Parameter(torch.ones(4))]
    return [zipfile.ZipFile(io.BytesIO(torch_saved(value))).read("archive/data.pkl") for value in values]


def random_pickles(count: int, seed: int) -> Iterator[bytes]:
    """Random programs, calls of known names with random arguments, and good pickles with changed bytes."""
    draw, whole = random.Random(seed), good()
    for number_ in range(count):
        if number_ % 3 == 0:
            yield b"".join(draw.choices(PARTS, k=draw.randint(1, 30))) + pickle.STOP
        elif number_ % 3 == 1:
            args = draw.choices(PARTS[:30], k=draw.randint(0, 7))
            made = call(draw.choice(NAMES), *args) if draw.random() < 0.7 else array(*draw.choices(PARTS[:40], k=3))
            yield built(made, *draw.choices(PARTS[:40], k=draw.randint(0, 9))) + pickle.STOP
        else:
            changed = bytearray(draw.choice(whole))
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            yield bytes(changed)


def check_data(found: Any, size: int) -> None:
    """Raise unless something is data of no more bytes than its file, which can be printed."""
    if isinstance(found, torch.Tensor):
        assert type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided
        last = found.storage_offset() + sum((n - 1) * s for n, s in zip(found.shape, found.stride(), strict=True)) + 1
        held = found.untyped_storage().nbytes()
        assert held <= size and (not found.numel() or last * found.element_size() <= held)
    elif isinstance(found, (np.ndarray, np.generic)):
        assert found.dtype.kind not in "OV" and found.nbytes <= size
    elif isinstance(found, dict):
        for part in (*found, *found.values(), *getattr(found, "__dict__", {}).values()):
            check_data(part, size)
    elif isinstance(found, (list, tuple, set)):
        for part in found:
            check_data(part, size)
    else:
        known = (type(None), int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
        assert isinstance(found, known), type(found)
    repr(found)


def read_all(program: bytes, folder: Folder) -> int:
    """Read a pickle in all ways; return how often it was read, checked to be data, and not refused."""
    whole = wrapped(program)
    accepted = 0
    for read in (
        lambda: check_data(from_bytes("k", whole), len(whole)),
        lambda: check_data(decode_shard("k", whole, (4,), "float32"), len(whole)),
        lambda: read_metadata(program, folder) and None,
    ):
        try:
            read()
            accepted += 1
        except CheckpointError as error:
            assert len(str(error)) < 700, str(error)[:1000]  # noqa: PT017
    return accepted


def main(count: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    before, accepted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    with tempfile.TemporaryDirectory() as place:
        for attack, program in ATTACKS.items():
            harmless = attack == "large memo"  # of which only None is read
            assert bool(read_all(program + pickle.STOP, Folder(place))) == harmless, attack
        for program in good():
            assert read_all(program, Folder(place)), program
        for at, program in enumerate(random_pickles(count, seed)):
            try:
                accepted += bool(read_all(program, Folder(place)))
            except BaseException:
                print(f"pickle {at} of seed {seed}: {program[:2000]!r}", file=sys.stderr)
                raise
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < GROWTH, f"the process has grown by {grown} kB"
    print(f"{len(ATTACKS)} attacks refused; of {count} random pickles, {accepted} were data; grown by {grown} kB")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
