"""Run many random programs: ``python -m tests.contract --seed 0 -n 1000``; or some by name: ``-k PATTERN``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contract.comparison import Difference
from contract.programs import PROGRAMS
from contract.running import run
from ranks import RankPool, RanksFailed


def kind_of(difference: Difference) -> tuple[str, ...]:
    """Of which kind a difference is: the property, what each shows, without numbers, and at what kind of point."""
    point = re.match(r"(late |backward )?[a-z-]*|", difference.point)
    where = ("in backward, " if difference.in_backward else "") + (point[0] if point else "")
    shown = (re.sub(r"\[.*|\d[\d.e+-]*", "#", str(value))[:60] for value in (difference.theirs, difference.ours))
    return (re.sub(r"[\d.]+.*", "#", difference.what), *shown, where)


def main() -> int:
    """Exit code: 1 if something differs that is not allowed."""
    parser = argparse.ArgumentParser(prog="contract", description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("-k", help="the named programs that match this pattern, in place of random ones")
    parser.add_argument("--all-programs", action="store_const", const="", dest="k", help="all named programs")
    parser.add_argument("--all", action="store_true", help="print each difference, also what is allowed")
    given = parser.parse_args()
    names: list[str | int] = list(range(given.seed, given.seed + given.n))
    if given.k is not None:
        names = [name for name in PROGRAMS if re.search(given.k, name)]
    pool, began, failed = RankPool(), time.monotonic(), 0
    kinds: dict[tuple[object, ...], list[Difference]] = defaultdict(list)
    programs: dict[tuple[object, ...], dict[str, None]] = defaultdict(dict)
    for number, name in enumerate(names):
        try:
            found = run(pool, name, given.all)
        except RanksFailed as error:
            failed += 1
            print(f"\n=== {name} failed\n{error}", flush=True)
            continue
        different = [difference for result in found for difference in result.different]
        failed += bool(different)
        for difference in different:
            kind = *kind_of(difference), difference.right
            kinds[kind].append(difference)
            programs[kind][str(name)] = None
        if given.k is not None:
            refused = f", torch refuses: {found[0].refused}" if found[0].refused else ""
            print(f"{name}: {found[0].points} points, {len(different)} differences{refused}", flush=True)
            for text in dict.fromkeys(map(str, different)) if given.all else ():
                print(f"    {text}")
        if number % 20 == 19:
            elapsed = time.monotonic() - began
            print(f"{number + 1} of {len(names)} programs, {failed} failed, {elapsed:.0f} s", flush=True)
    pool.close()
    for kind, differences in sorted(kinds.items(), key=lambda item: -len(programs[item[0]])):
        shown, (what, theirs, ours, point, right) = list(programs[kind]), kind
        print(f"\n{len(shown)} programs ({'; '.join(shown[:6])}): {point}: {what}: torch {theirs}, fullshard {ours}")
        if right:
            print(f"  losses of the unsharded model: {right}")
        print(f"  first: {differences[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
