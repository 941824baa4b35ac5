"""What a rank runs: it joins the process group, then runs one body after the other until pytest goes away."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib.util
import itertools
import marshal
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from ranks.device import DeviceOfTests, check_races, device_of, forget_races, process_group_backend
from ranks.outcome import Outcome
from ranks.rank import Rank

GROUP_TIMEOUT = timedelta(seconds=30)  # a collective that some rank never joins fails after this
DUMP_STACKS = signal.SIGUSR1


@dataclass(frozen=True)
class Job:
    """One body to run, sent by its name: its module is loaded from the file, then ``arguments``."""

    module: str
    path: str
    qualname: str
    arguments: bytes
    search_path: tuple[str, ...]


def log_path(directory: Path, rank: int) -> Path:
    """File that has stdout and stderr of a rank."""
    return directory / f"rank{rank}.log"


def stacks_path(directory: Path, rank: int) -> Path:
    """File to which a rank writes its Python stacks upon the signal ``DUMP_STACKS``."""
    return directory / f"rank{rank}.stacks"


def serve(descriptor: int, rank: int, world_size: int, directory: Path) -> None:
    """Join the world, say so with one outcome, then answer every job with its outcome."""
    connection = Connection(descriptor)
    _redirect_output(log_path(directory, rank))
    stacks = stacks_path(directory, rank).open("w")
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)

    place: list[Rank] = []
    joined = _run(rank, lambda: place.append(_join(rank, world_size, directory)))
    connection.send_bytes(pickle.dumps(joined))
    initial_state = dict(os.environ), os.getcwd()
    jobs = itertools.count(1)
    usual = distributed_c10d._hash_ranks_to_str
    # c10d names some groups by how many there are, and names must not come again when those of a body are destroyed.
    distributed_c10d._hash_ranks_to_str = lambda ranks: usual([*ranks, number])
    while not joined.failed:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        number = next(jobs)
        _reset(*initial_state)
        outcome = _run(rank, lambda job=job: _call(job, place[0], directory.parent))
        connection.send_bytes(_pickled(outcome))


def _redirect_output(path: Path) -> None:
    with path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _join(rank: int, world_size: int, directory: Path) -> Rank:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(directory / "store"), world_size)
    device = device_of(rank)
    dist.init_process_group(
        process_group_backend(device, world_size), store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    mesh = init_device_mesh(device.type, (world_size,))
    dist.barrier()  # connects every pair now, so that a first collective in a test is as fast as any other
    return Rank(rank, world_size, mesh, dist.group.WORLD, device)


def _reset(environment: dict[str, str], directory: str) -> None:
    """Give every body the state that a new process would have, as far as bodies are known to change it."""
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(directory)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _destroy_groups(rank: Rank) -> None:
    """Destroy the process groups that bodies have made: each has a thread, which takes time from later bodies.

    Not at the end of the body: other ranks may still wait for what this one has sent.
    """
    if rank.group not in distributed_c10d._world.pg_map:
        return  # a body has destroyed them all
    groups = sys.modules.get("fullshard.comm.groups")  # some ranks are to find out what importing it does
    kept = {rank.group}
    for mesh in (rank.mesh, *rank._meshes.values()):
        kept.update(mesh.get_all_groups())
    for group in tuple(kept) if groups is not None else ():
        kept.update(groups.record_of(group).parts.values())
    gone = set(distributed_c10d._world.pg_map) - kept
    for group in gone:
        dist.destroy_process_group(group)
    if gone and "torch.distributed.tensor" in sys.modules:  # its caches give equal meshes, of groups that are gone
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _call(job: Job, rank: Rank, compiled: Path) -> Any:
    _destroy_groups(rank)
    sys.path[:] = job.search_path
    body: Any = _load(job.module, job.path, compiled)
    for name in job.qualname.split("."):
        body = getattr(body, name)
    body = getattr(body, "__rank_body__", body)
    arguments, options = pickle.loads(job.arguments)
    forget_races(rank.device)
    before = _functions()
    try:
        with DeviceOfTests(rank.device) if rank.device.type != "cpu" else contextlib.nullcontext():
            value = body(rank, *arguments, **options)
    finally:
        for argument in (*arguments, *options.values()):
            if isinstance(argument, pytest.MonkeyPatch):  # a copy of the fixture, which pytest does not undo here
                argument.undo()
        replaced = _put_back(before)
    check_races(rank.device)
    if replaced:
        raise AssertionError(f"{job.qualname} left replaced, for the tests after it: {', '.join(replaced)}")
    return value


_Functions = dict[tuple[Any, str], object]  # by what has them, and name


def _functions() -> _Functions:
    """Return the library's own functions and methods, which a test may replace for its own time only."""
    found: _Functions = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("fullshard."):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue  # torch.compile puts its functions into modules, and removes them
            if isinstance(value, FunctionType) and str(value.__module__).startswith("fullshard."):
                found[module, name] = value
            elif isinstance(value, type) and value.__module__ == module_name:
                for key, item in vars(value).items():
                    if isinstance(item, (FunctionType, classmethod, staticmethod, property)):
                        found[value, key] = item
    return found


def _put_back(before: _Functions) -> list[str]:
    """Undo what a test has left replaced, and return the names."""
    replaced = []
    for (owner, name), function in before.items():
        found = vars(owner).get(name)
        if found is not function and _plain(found) is not _plain(function):
            setattr(owner, name, function)
            within = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
            replaced.append(f"{within}.{name}")
    return replaced


def _plain(found: Any) -> Any:
    """Return the function of a static method; and of the step of an optimizer class, which torch wraps once."""
    function = getattr(found, "__func__", found)
    return function.__wrapped__ if getattr(function, "hooked", False) else function


def _load(name: str, path: str, compiled: Path) -> ModuleType:
    """Import a test module once, with pytest's assertion rewriting, so that ``assert`` tells its values.

    The ranks of a pool share what one of them has compiled, in the folder ``compiled``.
    """
    if name in sys.modules:
        loaded = sys.modules[name]
        if loaded.__file__ != path:
            raise ImportError(f"two modules are called {name}: {loaded.__file__} and {path}")
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(_code(Path(path), compiled), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _code(path: Path, compiled: Path) -> CodeType:
    kept = compiled / f"{path.parent.name}-{path.stem}-{path.stat().st_mtime_ns}.code"
    if kept.exists():
        return marshal.loads(kept.read_bytes())
    code = _compile(path)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_bytes(marshal.dumps(code))
    written.replace(kept)
    return code


def _compile(path: Path) -> CodeType:
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:  # not a public name of pytest: without it, assertions are merely less talkative
        pass
    else:
        rewrite_asserts(tree, source, str(path))
    return compile(tree, str(path), "exec", dont_inherit=True)


def _run(rank: int, work: Callable[[], Any]) -> Outcome:
    try:
        value = work()
    except BaseException as error:
        return _failure(rank, error)
    gc.collect()
    return Outcome(rank, "returned", time.monotonic(), value)


def _failure(rank: int, error: BaseException) -> Outcome:
    when = time.monotonic()
    types = tuple(kind.__qualname__ for kind in type(error).__mro__[:-1])
    if isinstance(error, pytest.skip.Exception):
        return Outcome(rank, "skipped", when, error_types=types, message=str(error))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the frames of this file say nothing about the test
    shown = frames or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, shown))
    return Outcome(rank, "raised", when, error_types=types, message=str(error), traceback=text)


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        what = f"the body returned a {type(outcome.value).__qualname__}, which cannot be pickled: {error}"
        return pickle.dumps(_failure(outcome.rank, TypeError(what)))
