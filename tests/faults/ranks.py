"""Faults in how ranks agree."""

from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "ranks/agreement.py",
        "        raise_on_all(explain(found) if found else None, groups[index + 1 :])\n",
        "        raise_on_all(explain(found) if found else None, [])\n",
        "Ranks of one row of a mesh raise, and those of another row wait for them until the time-out.",
        ("test_agreement_of_ranks.py",),
    ),
    Fault(
        "ranks/barrier.py",
        "        self.failed = True\n        return error_from(kind or FullshardError.__name__, message)\n",
        "        return error_from(kind or FullshardError.__name__, message)\n",
        "After a failed step the failing rank makes one barrier more than the others, which pairs wrong calls later.",
        ("checkpoint/test_barrier.py",),
    ),
    Fault(
        "ranks/barrier.py",
        "        PROGRESS.barriers[store.name] = store.ranks, store.count\n",
        "        pass\n",
        "Who waits in a save for a rank that waits elsewhere is not known to wait for it.",
        ("checkpoint/test_barrier.py",),
    ),
    Fault(
        "ranks/watchdog.py",
        "                abort(group)\n",
        "                pass\n",
        "Ranks that wait for different units wait until the back end's time-out.",
        ("test_watchdog.py",),
    ),
    Fault(
        "progress.py",
        "            self.snapshots.append((self.count, self.digest, self.steps))\n",
        "            self.snapshots.append((self.count, self.digest, 0))\n",
        "A rank that is a microbatch ahead trains with parameters of other steps, and nobody is told.",
        ("test_watchdog.py",),
    ),
    Fault(
        "engine/optimizer_steps.py",
        "                log.stepped()\n",
        "                pass\n",
        "A rank leaves out steps of the optimizer, and shards of several steps are gathered into one parameter.",
        ("test_watchdog.py",),
    ),
    Fault(
        "progress.py",
        "repr((kind, units, layouts, numbers)).encode()",
        "repr((kind, units, numbers)).encode()",
        "Ranks that cut parameters differently train with a mixture of them, and nobody is told.",
        ("test_watchdog.py",),
    ),
    Fault(
        "engine/buckets/per_parameter.py",
        'f"{super()._where(index)}, {self.layout.slots[index].route.value}"',
        "self.layout.slots[index].route.value",
        "Ranks that cut parameters along different dims train with a mixture of them, and nobody is told.",
        ("test_watchdog.py",),
    ),
    Fault(
        "engine/prefetch.py",
        "            if launch and (alone or unit.mesh is not launch[-1].mesh):  # there it may be large on others\n",
        "            if launch and alone:\n",
        "Ranks whose experts are of other sizes launch different all-gathers, and wait for each other forever.",
        ("test_watchdog.py",),
    ),
    Fault(
        "ranks/verdict.py",
        "    if slow:\n",
        "    if False:\n",
        "A slow rank is not reported.",
        ("test_watchdog.py",),
    ),
    Fault(
        "ranks/verdict.py",
        "(of := _of(reports, name, r, own)) and of.end <= number]\n",
        "not (of := _of(reports, name, r, own)) or of.end <= number]\n",
        "A run is ended because a rank sends weights to a process that is not in the world.",
        ("test_watchdog.py",),
    ),
    Fault(
        "ranks/verdict.py",
        "        own.began < own.end <= _awaited(reports[each], name) and ",
        "        own.end <= _awaited(reports[each], name) and ",
        "A run is ended because a rank has handled an exception of an evaluation of its own.",
        ("test_watchdog.py",),
    ),
    Fault(
        "ranks/watchdog.py",
        "if state == GONE or (state != RUNS and",
        "if state == GONE or (",
        "A run is ended because a process holds Python's lock for long.",
        ("test_watchdog.py",),
    ),
    Fault(
        "progress.py",
        "repr((kind, units, layouts, numbers)).encode()",
        "repr((kind, units, layouts)).encode()",
        "Two models of one class that one rank calls in another order are mixed up, and nobody is told.",
        ("test_watchdog.py",),
    ),
]
