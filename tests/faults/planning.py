"""Faults in plans: of memory, of time, and of what is recommended."""

from tests.faults.fault import Fault

_PLAN, _CHOICES = "test_planning.py", "test_planning_choices.py"

FAULTS: list[Fault] = [
    Fault(
        "planning/ledger.py",
        "                self._resized(storage._cdata, nbytes, kind=kind)\n",
        "                pass\n",
        "Unsharded parameters are never freed in a plan.",
        (_PLAN,),
    ),
    Fault(
        "planning/caching.py",
        "        pool = self._free[stream, small]\n",
        "        pool = self._free[0, small]\n",
        "A stream takes memory that another one has freed.",
        (_PLAN,),
    ),
    Fault(
        "planning/operations.py",
        '            kind = "attention" if packet in _ATTENTION else "matmul"\n',
        '            kind = "matmul"\n',
        "Attention is as fast as matrix products.",
        (_PLAN,),
    ),
    Fault(
        "planning/cluster.py",
        "            latency=found.latency * share,  # a ring of fewer ranks\n",
        "",
        "A ring of one rank for each node has the latency of all ranks.",
        (_PLAN,),
    ),
    Fault(
        "planning/simulation/clocks.py",
        "        return seconds + busy - done if seconds > done else seconds / (1 - self._contention)\n",
        "        return seconds\n",
        "Messages beside computation take nothing of the processor.",
        (_CHOICES,),
    ),
    Fault(
        "planning/search.py",
        "            return self.lacking < other.lacking\n",
        "            return self.seconds < other.seconds\n",
        "A step that does not fit is recommended because it is faster.",
        (_CHOICES,),
    ),
    Fault(
        "planning/search.py",
        "        distance = (self._blocks - SHORT[0]) / (SHORT[1] - SHORT[0])\n",
        "        distance = (self._blocks - SHORT[1]) / (SHORT[1] - SHORT[0])\n",
        "Estimates of deep models are of two blocks fewer.",
        (_CHOICES,),
    ),
    Fault(
        "planning/dry_run.py",
        'leave_out(_KINDS["optimizer step"]) / cluster.bus',
        'leave_out(_KINDS["optimizer step"]) * 0',
        "Offloaded optimizer state takes no time.",
        (_CHOICES,),
    ),
    Fault(
        "planning/choices.py",
        "            plan=plan_blocks(model, blocks_per_unit=self.blocks_per_unit),\n",
        "            plan=plan_blocks(model),\n",
        "Units are of one block, whatever the choice.",
        (_CHOICES,),
    ),
    Fault(
        "planning/plan.py",
        "        if mesh.size() != self.ranks:\n",
        "        if mesh.size() > self.ranks:\n",
        "A plan of more ranks is applied without a word.",
        (_CHOICES,),
    ),
]
