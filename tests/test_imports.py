"""House rules about who may use what: directions, layers, banned packages, and the owners of hooks and storage.

All checks read source text, so that imports inside functions and under TYPE_CHECKING count too, and no file
has to exist. Rules are functions of a file's path and text; each is shown to find what it looks for.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest

from source_files import NAME, Source, package_sources

# From top to bottom. A module imports its own layer or those below. "" is the package's __init__.
LAYERS = [
    {"cli", "__main__"},
    {"train", "planned", "dropin"},
    {"ragged"},  # a layout that is added by its import: nothing that it is plugged into knows it
    {""},
    {"composable", "wrapper", "planning"},
    {"frontend"},
    {"activation_checkpoint", "activation_offload", "comm_hooks"},
    {"wrap"},
    {"checkpoint", "debug", "optim", "plan"},
    {"engine"},
    {"ranks"},
    {"layout", "comm", "memory", "profiling", "progress", "allocator", "policy"},
    {"errors", "messages", "version"},
]
# The parts of the lowest layer are independent, but for this.
BOTTOM = {
    "layout": {"errors"},
    "comm": {"errors", "layout", "memory", "policy", "progress"},
    "memory": {"errors", "policy", "progress"},
    "progress": {"errors"},
    "allocator": set(),
    "profiling": {"progress"},
    "policy": {"errors"},
    "errors": set(),
    "messages": set(),
    "version": set(),
}
PURE = {"layout", "errors", "messages", "version"}  # nothing but the standard library: no torch

BANNED = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fully_shard",
    "fairscale",
    "deepspeed",
)
MAY_NAME_BANNED = {"dropin"}

HOOKS = {
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_hook",
    "register_prehook",
    "register_multi_grad_hook",
    "register_post_accumulate_grad_hook",
    "queue_callback",
    "torch.autograd.Function",
}
STORAGE = {
    "resize_",
    "record_stream",
    "pin_memory",
    "torch.cuda.Stream",
    "torch.cuda.Event",
    "torch.Stream",
    "torch.Event",
}
# Names -> files and folders that may use them. train and debug are users of the library, with hooks of their own;
# planning replaces storage and streams.
OWNERS = {
    "hooks and autograd nodes": (HOOKS, {"engine/hooks.py"}, {"train", "debug"}),
    "storage, streams and pinning": (STORAGE, {"memory.py"}, {"train", "planning"}),
}

IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name"}


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that is imported, by statements and importlib calls."""
    package = [NAME, *source.path.split("/")[:-1]]
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *filter(None, [module])])
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).rpartition(".")[2] in IMPORTERS:
                    yield node.lineno, name


def layer_of(part: str) -> int | None:
    """Index into LAYERS."""
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def check_layers(source: Source) -> Iterator[str]:
    own = layer_of(source.part)
    if own is None:
        yield f"{source.path}: {source.part!r} has no layer; add it to LAYERS of this test"
        return
    for line, name in imports(source):
        top, *rest = name.split(".")
        if top != NAME:
            continue
        part = rest[0] if rest and layer_of(rest[0]) is not None else ""
        if layer_of(part) < own:
            yield f"{source.path}:{line}: imports {name}, which is above {source.part}"
        elif source.part in BOTTOM and part != source.part and part not in BOTTOM[source.part]:
            yield f"{source.path}:{line}: {source.part} must not import {name}"


def known_files(sources: Iterable[Source]) -> dict[str, set[str]]:
    """The files that each file imports from, types included, by dotted names."""
    names = {source.name for source in sources}
    known: dict[str, set[str]] = {}
    for source in sources:
        found = {name if name in names else name.rpartition(".")[0] for _, name in imports(source)}
        known[source.name] = (found & names) - {source.name}
    return known


def circles(known: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of files that know each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for name in known:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = known[todo.pop()] - seen
            seen |= new
            todo += new
        reached[name] = seen
    found = {frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in known}
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def check_purity(source: Source) -> Iterator[str]:
    if source.part in PURE:
        for line, name in imports(source):
            if (top := name.partition(".")[0]) != NAME and top not in sys.stdlib_module_names:
                yield f"{source.path}:{line}: {source.part} is pure Python, it must not import {name}"


def check_banned(source: Source) -> Iterator[str]:
    if source.part in MAY_NAME_BANNED:
        return
    for line, name in all_names(source):
        if any(f"{name}.".startswith(f"{banned}.") for banned in BANNED):
            yield f"{source.path}:{line}: uses {name}, which this project replaces"


@cache
def all_names(source: Source) -> set[tuple[int, str]]:
    """Line and dotted name of all that is imported or used."""
    return {*imports(source), *used_names(source)}


def used_names(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every name used, its first segment resolved through the imports."""
    origins: dict[str, str] = {}
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                origins |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                origins |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            yield node.lineno, origins.get(first, first) + dot + rest


def check_owners(source: Source) -> Iterator[str]:
    for what, (names, files, parts) in OWNERS.items():
        if source.path in files or source.part in parts:
            continue
        for line, name in sorted({*_touched(source, names)}):
            yield f"{source.path}:{line}: uses {name}; only {', '.join(sorted(files))} touches {what}"


def _touched(source: Source, names: set[str]) -> Iterator[tuple[int, str]]:
    """Uses of names: methods, classes by their full name, getattr by string, keywords of torch functions."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name in names:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in names - {"pin_memory"}:  # a policy has a field of this name
                yield node.lineno, name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]) if name in names:
                yield node.lineno, name
            case ast.Call(func=function, keywords=keywords) if ast.unparse(function).startswith("torch."):
                yield from ((node.lineno, keyword.arg) for keyword in keywords if keyword.arg in names)
    for line, name in all_names(source):
        if name in names - {"pin_memory"}:
            yield line, name


CHECKS = {check.__name__: check for check in (check_layers, check_purity, check_banned, check_owners)}


@pytest.mark.parametrize("name", CHECKS)
def test_package_keeps_the_house_rules(name: str) -> None:
    """Every file of the package imports downward only, and leaves to others what is theirs."""
    wrong = [message for source in package_sources() for message in CHECKS[name](source)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_knowledge_points_downward() -> None:
    """No two files know each other, not even by the types that they annotate: each can be read before those above."""
    found = circles(known_files(package_sources()))
    assert not found, "\n" + "\n".join(" <-> ".join(circle) for circle in found)


def test_circles_are_found() -> None:
    """Files that know each other through others, or by types only, are found; those that share a file are not."""
    sources = [
        Source("engine/a.py", "from fullshard.engine.b import B"),
        Source("engine/b.py", "from fullshard.engine import c"),
        Source("engine/c.py", "if TYPE_CHECKING:\n    from .a import A"),
        Source("engine/d.py", "def f():\n    from fullshard.engine.a import A\n    from fullshard.engine.b import B"),
    ]
    assert circles(known_files(sources)) == [["fullshard.engine.a", "fullshard.engine.b", "fullshard.engine.c"]]
    assert not circles(known_files([sources[0], sources[1], Source("engine/c.py", "import torch"), sources[3]]))


# What each check finds in a file, however it is written, and what it leaves alone there.
UNIT = "engine/unit.py"
FOUND = [
    (check_layers, UNIT, "from fullshard.composable.fully_shard import FSDPModule"),
    (check_layers, UNIT, "import fullshard"),
    (check_layers, UNIT, "def f():\n    from ..checkpoint import save"),
    (check_layers, UNIT, "if TYPE_CHECKING:\n    from ..wrap.policy import Plan"),
    (check_layers, UNIT, "importlib.import_module('fullshard.trace')"),
    (check_layers, "engine/buckets/formats.py", "from fullshard.ragged.parameter import RaggedShardingFormat"),
    (check_layers, "layout/flat.py", "from fullshard.comm import gloo"),
    (check_layers, "memory.py", "from .layout import flat"),
    (check_layers, "surprise.py", ""),
    (check_purity, "layout/flat.py", "from torch import Size"),
    (check_purity, "layout/flat.py", "def f():\n    import numpy as np"),
    (check_banned, UNIT, "import torch.distributed.fsdp"),
    (check_banned, UNIT, "from torch.distributed import fsdp"),
    (check_banned, UNIT, "from torch.distributed._composable.fsdp import fully_shard"),
    (check_banned, UNIT, "def f():\n    import fairscale.nn"),
    (check_banned, UNIT, "__import__('deepspeed')"),
    (check_banned, UNIT, "import torch.distributed as dist\nx = dist.fsdp"),
    (check_owners, UNIT, "module.register_forward_pre_hook(f)"),
    (check_owners, UNIT, "register = module.register_forward_hook"),
    (check_owners, UNIT, "getattr(module, 'register_forward_hook')(f)"),
    (check_owners, UNIT, "from torch.autograd import Function\nclass A(Function): ..."),
    (check_owners, UNIT, "tensor.untyped_storage().resize_(0)"),
    (check_owners, UNIT, "import torch\ntorch.empty(3, pin_memory=True)"),
    (check_owners, UNIT, "import torch as t\ndef f(x: t.Stream) -> t.Event: ..."),
]
LEFT_ALONE = [
    (check_layers, "__init__.py", "from fullshard.composable.fully_shard import fully_shard\nfrom .policy import X"),
    (check_layers, UNIT, "from .bucket import Bucket\nfrom ..layout import flat\nfrom .. import errors, memory"),
    (check_layers, "comm/gloo.py", "from fullshard.layout.flat import Flat\nfrom ..errors import FullshardError"),
    (check_purity, UNIT, "import torch"),
    (check_purity, "layout/flat.py", "import math\nfrom fullshard.errors import FullshardError"),
    (check_banned, "dropin.py", "import torch.distributed.fsdp"),
    (check_banned, UNIT, "import torch.distributed.fsdp_like\nx.fsdp"),
    (check_owners, "engine/hooks.py", "module.register_forward_pre_hook(f)"),
    (check_owners, "memory.py", "tensor.untyped_storage().resize_(0)"),
    (check_owners, "train/loop.py", "module.register_forward_pre_hook(f)\nx.record_stream(s)"),
    (check_owners, UNIT, "import torch\npolicy.pin_memory\nOffload(pin_memory=True)\nx.resize(3)\nx.Function"),
]


def test_checks_find_what_they_look_for() -> None:
    """Each way to write what is forbidden is found, and what is allowed or merely looks alike is not."""
    assert not [(check, path, text) for check, path, text in FOUND if not list(check(Source(path, text)))]
    assert not [(check, path, text) for check, path, text in LEFT_ALONE if list(check(Source(path, text)))]
