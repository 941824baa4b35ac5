"""``python -m fullshard`` and the command ``fullshard``."""

from __future__ import annotations

import os
import signal
import sys

from fullshard.train import stop


def main() -> None:
    """Run the command line. Until it is imported, and in a worker until it trains, signals just end the process."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    is_worker = "RANK" in os.environ and sys.argv[1:2] == ["train"]
    if is_worker:
        stop.end_with_launcher()
    from fullshard.cli import app

    if not is_worker:
        signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()
