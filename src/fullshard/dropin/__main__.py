"""``python -m fullshard.dropin [-m] program args...``: run a program on fullshard without changing it.

The interpreter is started anew with the program, as ``python [-m] program args...``, and installs fullshard as every
Python process does that the program starts, see [Note: Inheritance].
"""

from __future__ import annotations

import os
import subprocess
import sys

from fullshard.dropin.inheritance import patch_pythonpath

USAGE = """usage: python -m fullshard.dropin [-m] program [args...]

Runs a Python script, or with -m a module, with fullshard instead of torch.distributed.fsdp, also in the Python
processes that it starts. With torchrun: torchrun --nproc-per-node 2 -m fullshard.dropin [-m] program [args...]"""

# Flags of the interpreter, inherited by child processes, that make it ignore PYTHONPATH or site. -I sets two.
ISOLATING_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


def main(arguments: list[str]) -> int:
    """Become the program that the arguments name, in the same process.

    Args:
        arguments: Arguments of ``python -m fullshard.dropin``.

    Returns:
        Exit status, if there is nothing to run: 2 for wrong arguments, 0 for ``--help``.
    """
    if not arguments or arguments == ["-m"]:
        print(USAGE, file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    flag = next((flag for name, flag in ISOLATING_FLAGS.items() if getattr(sys.flags, name)), None)
    if flag is not None:
        why = f"run Python without {flag}: with it, processes that the program starts would not use fullshard"
    elif arguments[0] != "-m" and not os.path.exists(arguments[0]):
        why = f"there is no file {arguments[0]}; to run a module pass -m {arguments[0]}"
    else:
        patch_pythonpath()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing uses it, too
        os.execv(sys.executable, [sys.executable, *flags, *arguments])
    print(f"fullshard.dropin: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
