"""Faults in checkpoints, optimizer state and safetensors files; their tests should notice them."""

from __future__ import annotations

from tests.faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "engine/parameters/placement.py",
        "for axis in [*(axis for axis in axes if axis not in strided), *reversed(strided)]:",
        "for axis in axes:",
        "Shards of parameters that tensor parallelism cuts on the same dim are saved at wrong places.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "engine/parameters/tensor_shards.py",
        "held = region is not None and (region.numel or not math.prod(shape))",
        "held = region is not None and region.numel",
        "Parameters without elements are missing from checkpoints.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/state/optimizer/target.py",
        "present = planned.present.get(path) if len(sharded) == len(member.originals) else None",
        "present = planned.present.get(path)",
        "A part of a flat parameter that had no state when it was saved keeps the state that it has now.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "checkpoint/state/optimizer/target.py",
        "                optimizer.state.pop(member.parameter, None)\n",
        "                pass\n",
        "State of a parameter that had none when it was saved stays.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "checkpoint/state/optimizer/target.py",
        "            return present.fill_(saved)\n",
        "            return saved\n",
        "A learning rate that is a tensor, which compiled steps read, is replaced by a number.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "checkpoint/state/optimizer/target.py",
        "next((name for name in original.fqns if name in self.known), original.fqn)",
        "next((name for name in original.fqns[:1] if name in self.known), original.fqn)",
        "The state of a tied parameter that was saved under its other name is not found.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "checkpoint/saving.py",
        "if failure is not None and not observed:",
        "if failure is not None and observed:",
        "Nobody hears of a background save that failed.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/loading.py",
        "            mark_shards_written(component.model)\n",
        "            pass\n",
        "The next forward computes with full parameters from before the load.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/loading.py",
        'return f"{RANDOM}{self._barrier.rank}"',
        'return f"{RANDOM}0"',
        "All ranks draw the random numbers of the first one after a load.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/state/snapshot.py",
        "    compare(dict(sorted(own.local.items())), [group], _different_local_parameters)\n",
        "",
        "Of parameters that differ between ranks only one rank's are saved, without a word.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/format/write_plan.py",
        "        loads[ranks[place]] += numel[place]\n",
        "",
        "One rank writes all that is replicated.",
        ("checkpoint/test_write_plan.py", "checkpoint/test_export.py"),
    ),
    Fault(
        "checkpoint/format/writer.py",
        "    _check_files(folder, index)\n",
        "",
        "A save whose files lie on several machines replaces the checkpoint that was there.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/format/writer.py",
        " or _TEMPORARY.fullmatch(name)]\n",
        "]\n",
        "Temporary files of killed saves fill the disk.",
        ("checkpoint/test_storage.py",),
    ),
    Fault(
        "checkpoint/loading.py",
        'self._on_all("checking tensors", lambda: self._reader.check(shards))',
        "self._reader.check(shards)",
        "A rank that finds its data damaged raises alone, and the others have changed their models.",
        ("checkpoint/test_save_load.py",),
    ),
    Fault(
        "checkpoint/format/reader.py",
        "version is None or version != self.folder.version(name)",
        "version is None",
        "A file that changes between the two reads of a load is read into the model.",
        ("checkpoint/test_hostile.py",),
    ),
    Fault(
        "checkpoint/key_map.py",
        "key=lambda pair: -len(pair[0])",
        "key=lambda pair: len(pair[0])",
        "The shorter of two prefixes decides where a tensor is loaded.",
        ("checkpoint/test_foreign_layouts.py",),
    ),
    Fault(
        "checkpoint/state/materialize.py",
        "                value_of(tensor).copy_(value)\n",
        "",
        "Making a buffer overwrites parameters that the files lack.",
        ("checkpoint/test_import.py",),
    ),
]
