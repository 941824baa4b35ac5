"""Run many histories: ``python -m tests.fuzz 2000``, or ``make fuzz N=2000 SEED=0``.

Each failure is printed with its seed, its plan, and what differed; ``--shrink`` makes the first one small.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.draw import draw
from fuzz.running import Failure, run_all, run_one
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
    plans = [draw(seed) for seed in range(given.seed, given.seed + given.count)]
    began, over = time.monotonic(), 0
    kinds: Counter[str] = Counter()

    pool = RankPool()

    def progress(done: int, failed: Sequence[Failure]) -> None:
        nonlocal over
        over += done
        for failure in failed:
            kinds[failure.kind] += 1
            print(f"\n=== seed {failure.plan.seed} failed: {failure.kind}", flush=True)
            if kinds[failure.kind] == 1:
                print(failure.text, flush=True)
                if given.shrink:
                    small, last = shrink(failure, lambda plan: run_one(pool, plan))
                    print(f"\n--- smallest ---\n{small.describe()}\n{small!r}\n--- its failure ---\n{last.text}")
        elapsed = time.monotonic() - began
        print(f"{over} of {len(plans)} histories, {sum(kinds.values())} failed, {elapsed:.0f} s", flush=True)
        if failed and given.stop:
            raise KeyboardInterrupt

    try:
        failures = run_all(pool, plans, progress)
    except KeyboardInterrupt:
        return 1
    finally:
        pool.close()
    for kind, count in kinds.most_common():
        seeds = [failure.plan.seed for failure in failures if failure.kind == kind]
        print(f"{count:5d} x {kind}; seeds {seeds[:10]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
