"""``python -m fullshard.dropin [-m] program args...``: run a program on fullshard without touching it."""

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

from fullshard.dropin.inheritance import pass_on
from fullshard.dropin.installation import install

USAGE = """usage: python -m fullshard.dropin [-m] program [args...]

Runs a Python script, or with -m a module, with fullshard in the place of torch.distributed.fsdp; so do the Python
processes that it starts. With torchrun: torchrun --nproc-per-node 2 -m fullshard.dropin [-m] program [args...]"""

# Flags of the interpreter, which its children inherit, that have them ignore PYTHONPATH or what is in it. -I sets two.
DEAF = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


def main(arguments: list[str]) -> int:
    """Run what the arguments say.

    Returns:
        An exit status, if there is nothing to run; else the program's own end is this process's.
    """
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or (rest[0] in ("-h", "--help") and not as_module):
        print(USAGE, file=sys.stderr if not rest else sys.stdout)
        return 0 if rest else 2
    program = rest[0]
    if (flag := next((DEAF[name] for name in DEAF if getattr(sys.flags, name)), None)) is not None:
        return _refuse(f"run Python without {flag}: processes that the program starts would not run on fullshard")
    if not as_module and not os.path.exists(program):
        return _refuse(f"there is no {program}; for a module say -m {program}")
    install()
    pass_on()
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


def _refuse(why: str) -> int:
    print(f"fullshard.dropin: {why}", file=sys.stderr)
    return 2


def _set_path(first: list[str]) -> None:
    """Put what ``python`` would put in front of ``sys.path`` in the place of what ``-m`` has put there."""
    if not getattr(sys.flags, "safe_path", False):  # with -P neither puts anything there
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
        return _refuse(f"there is no module {name} that can be run")
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
    """Run ``code`` as ``__main__``, for good: atexit handlers and threads still look for its names there.

    ``runpy`` would put this module back.
    """
    module = ModuleType("__main__")
    vars(module).update(names, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
