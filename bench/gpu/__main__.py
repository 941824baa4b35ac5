"""The command of :mod:`bench.gpu.driver` by itself, for a machine on which little but torch is installed."""

import sys

from bench.command_line import start
from bench.gpu.driver import Options, run

if __name__ == "__main__":
    sys.exit(start("python -m bench.gpu", Options, run, "Run all that a real GPU can show."))
