"""Faults in plans: of memory, of time, and of what is recommended."""

from tests.faults.fault import Fault

_PLAN, _CHOICES = "test_planning.py", "test_planning_choices.py"

FAULTS: list[Fault] = [
    Fault(
        "planning/ledger.py",
        "                self._resized(storage._cdata, nbytes, kind=kind)\n",
        "                pass\n",
        "Unsharded parameters are never freed in a plan.",
        (f"{_PLAN}::test_parts_of_memory",),
    ),
    Fault(
        "planning/caching.py",
        "        pool = self._free[stream, small]\n",
        "        pool = self._free[0, small]\n",
        "A stream takes memory that another one has freed.",
        (f"{_PLAN}::test_caching_allocator",),
    ),
    Fault(
        "planning/operations.py",
        '            kind = "attention" if packet in _ATTENTION else "matmul"\n',
        '            kind = "matmul"\n',
        "Attention is as fast as matrix products.",
        (f"{_PLAN}::test_efficiencies_of_kinds",),
    ),
    Fault(
        "planning/cluster.py",
        "            latency=found.latency * share,  # a ring of fewer ranks\n",
        "",
        "A ring of one rank for each node has the latency of all ranks.",
        (f"{_PLAN}::test_clusters",),
    ),
    Fault(
        "planning/simulation/clocks.py",
        "        return seconds + busy - done if seconds > done else seconds / (1 - self._contention)\n",
        "        return seconds\n",
        "Messages beside computation take nothing of the processor.",
        (f"{_CHOICES}::test_contention",),
    ),
    Fault(
        "planning/search.py",
        "            return self.lacking < other.lacking\n",
        "            return self.seconds < other.seconds\n",
        "A step that does not fit is recommended because it is faster.",
        (f"{_CHOICES}::test_a_search_saves_memory_only_as_needed",),
    ),
    Fault(
        "planning/search.py",
        "        distance = (self._blocks - SHORT[0]) / (SHORT[1] - SHORT[0])\n",
        "        distance = (self._blocks - SHORT[1]) / (SHORT[1] - SHORT[0])\n",
        "Estimates of deep models are of two blocks fewer.",
        (f"{_CHOICES}::test_alternatives_are_what_full_plans_say",),
    ),
    Fault(
        "planning/dry_run.py",
        'leave_out(_KINDS["optimizer step"]) / cluster.bus',
        'leave_out(_KINDS["optimizer step"]) * 0',
        "Offloaded optimizer state takes no time.",
        (f"{_CHOICES}::test_offloaded_optimizer_state",),
    ),
    Fault(
        "planning/choices.py",
        "            plan=plan_blocks(model, blocks_per_unit=self.blocks_per_unit),\n",
        "            plan=plan_blocks(model),\n",
        "Units are of one block, whatever the choice.",
        (f"{_CHOICES}::test_a_plan_is_applied",),
    ),
    Fault(
        "planning/plan.py",
        "        if mesh.size() != self.ranks:\n",
        "        if mesh.size() > self.ranks:\n",
        "A plan of more ranks is applied without a word.",
        (f"{_CHOICES}::test_a_plan_of_something_else",),
    ),
]
