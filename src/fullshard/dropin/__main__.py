"""``python -m fullshard.dropin [-m] program args...``: run a program on fullshard without changing it."""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType

from fullshard.dropin.inheritance import patch_pythonpath
from fullshard.dropin.installation import install

USAGE = """usage: python -m fullshard.dropin [-m] program [args...]

Runs a Python script, or with -m a module, with fullshard instead of torch.distributed.fsdp, also in the Python
processes that it starts. With torchrun: torchrun --nproc-per-node 2 -m fullshard.dropin [-m] program [args...]"""

# Flags of the interpreter, inherited by child processes, that make it ignore PYTHONPATH or site. -I sets two.
ISOLATING_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


_run_main: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]  # python -m itself uses it


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
    sys.modules["__main__"] = ModuleType("__main__")  # stays after the end, for atexit handlers and threads
    if as_module:
        _set_path([os.getcwd()])
        _run_main(program)
    elif pkgutil.get_importer(program) is not None:  # a folder or an archive
        _set_path([])
        sys.path.insert(0, program)
        _run_main("__main__", alter_argv=False)
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
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)  # get_code would leave a .pyc behind
    names = vars(sys.modules["__main__"])
    names.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    exec(code, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
