"""Running the examples of the clients' pages as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fullshard.dropin")


def run_example(name: str, *arguments: str, by: tuple[str, ...] = TORCHRUN, **environment: str) -> str:
    """All that ``python -m BY examples/NAME ARGUMENTS`` prints, on two processes; it has to succeed."""
    outer = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *by, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, env={**outer, **quiet, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def losses_in(printed: str) -> list[float]:
    """The losses of lines such as "step 3: loss 1.25"."""
    return [float(loss) for loss in re.findall(r"^step \d+:? loss ([\d.]+)", printed, re.MULTILINE)]
