"""Run many histories: ``python -m tests.fuzz 2000``, or ``make fuzz N=2000 SEED=0``.

Each failure is printed with its seed, its plan, and what differed; ``--shrink`` makes the first of each kind small.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.draw import draw
from fuzz.running import run
from fuzz.shrink import shrink
from ranks import RankPool


def main() -> int:
    """Exit code: 1 if a history failed."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200, help="histories")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--shrink", action="store_true", help="make each failure (of a kind that is new) small")
    parser.add_argument("--stop", action="store_true", help="at the first failure")
    given = parser.parse_args()
    began = time.monotonic()
    seeds: dict[str, list[int]] = defaultdict(list)  # of failures, by kind
    pool = RankPool()
    for number in range(given.count):
        failure = run(pool, draw(given.seed + number))
        if failure is not None:
            seeds[failure.kind].append(given.seed + number)
            print(f"\n=== seed {given.seed + number} failed: {failure.kind}", flush=True)
            if len(seeds[failure.kind]) == 1:
                print(failure.text, flush=True)
                if given.shrink:
                    small = shrink(failure, lambda plan: run(pool, plan))
                    print(f"\n--- smallest ---\n{small.plan!r}\n--- its failure ---\n{small.text}")
            if given.stop:
                break
        if number % 20 == 19:
            elapsed, failed = time.monotonic() - began, sum(map(len, seeds.values()))
            print(f"{number + 1} of {given.count} histories, {failed} failed, {elapsed:.0f} s", flush=True)
    pool.close()
    for kind, found in seeds.items():
        print(f"{len(found):5d} x {kind}; seeds {found[:10]}")
    return 1 if seeds else 0


if __name__ == "__main__":
    sys.exit(main())
