"""``python -m fullshard.dropin [-m] program args...``: run a program on fullshard without touching it."""

from __future__ import annotations

import os
import runpy
import sys

from fullshard.dropin.inheritance import pass_on
from fullshard.dropin.installation import install

USAGE = """usage: python -m fullshard.dropin [-m] program [args...]

Runs a Python script, or with -m a module, with fullshard in the place of torch.distributed.fsdp; so do the Python
processes that it starts. With torchrun: torchrun --nproc-per-node 2 -m fullshard.dropin [-m] program [args...]"""


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
    if not as_module and not os.path.exists(program):
        print(f"fullshard.dropin: there is no {program}; for a module say -m {program}", file=sys.stderr)
        return 2
    install()
    pass_on()
    sys.argv = rest
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
