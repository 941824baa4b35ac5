"""``python -m fullshard`` and the command ``fullshard``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fullshard.cli import app

    signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()
