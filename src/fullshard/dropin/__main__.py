"""``python -m fullshard.dropin [-m] program args...``: run a program on fullshard without changing it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import runpy
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

from fullshard.dropin.inheritance import patch_pythonpath
from fullshard.dropin.installation import install

USAGE = """usage: python -m fullshard.dropin [-m] program [args...]

Runs a Python script, or with -m a module, with fullshard instead of torch.distributed.fsdp, also in the Python
processes that it starts. With torchrun: torchrun --nproc-per-node 2 -m fullshard.dropin [-m] program [args...]"""

# Flags of the interpreter, inherited by child processes, that make it ignore PYTHONPATH or site. -I sets two.
ISOLATING_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


def main(arguments: list[str]) -> int:
    """Install fullshard and run the program that the arguments name.

    Args:
        arguments: Arguments of ``python -m fullshard.dropin``.

    Returns:
        Exit status: 2 for wrong arguments, else 0. A program that exits by itself ends this process.
    """
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or (rest[0] in ("-h", "--help") and not as_module):
        print(USAGE, file=sys.stderr if not rest else sys.stdout)
        return 0 if rest else 2
    program = rest[0]
    flag = next((flag for name, flag in ISOLATING_FLAGS.items() if getattr(sys.flags, name)), None)
    if flag is not None:
        return _usage_error(
            f"run Python without {flag}: with it, processes that the program starts would not use fullshard"
        )
    if not as_module and not os.path.exists(program):
        return _usage_error(f"there is no file {program}; to run a module pass -m {program}")
    install()
    patch_pythonpath()
    sys.argv = rest
    if as_module:
        return _run_module(program)
    if pkgutil.get_importer(program) is not None:
        _set_path([])  # run_path puts the folder or archive there
        runpy.run_path(program, run_name="__main__")
    else:
        _set_path([os.path.dirname(os.path.realpath(program))])
        _run_file(os.path.join(os.getcwd(), program))
    return 0


def _usage_error(why: str) -> int:
    print(f"fullshard.dropin: {why}", file=sys.stderr)
    return 2


def _set_path(first: list[str]) -> None:
    """Replace the entry of ``sys.path`` that ``-m`` has added by those that ``python`` would add."""
    if not getattr(sys.flags, "safe_path", False):  # with -P neither adds any
        sys.path[:1] = first


def _run_file(path: str) -> None:
    loader: SourceFileLoader | SourcelessFileLoader
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)  # get_code would leave a .pyc behind
    assert code is not None  # only modules written in C have none
    _execute(code, __file__=path, __cached__=None, __loader__=loader)


def _run_module(name: str) -> int:
    _set_path([os.getcwd()])
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = _code_of(spec)
    if spec is None or code is None:
        return _usage_error(f"there is no module {name} that can be run")
    sys.argv = [spec.origin or name, *sys.argv[1:]]
    _execute(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,  # multiprocessing's children find the module by it
    )
    return 0


def _code_of(spec: ModuleSpec | None) -> CodeType | None:
    get_code = getattr(spec and spec.loader, "get_code", None)
    code: CodeType | None = None if spec is None or get_code is None else get_code(spec.name)
    return code


def _execute(code: CodeType, **names: Any) -> None:
    """Run ``code`` as ``__main__``, which stays in ``sys.modules`` for atexit handlers and threads.

    ``runpy`` would restore this module.
    """
    module = ModuleType("__main__")
    vars(module).update(names, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
