"""Faults in the wrapper and in what both front ends share; its tests should notice them."""

from __future__ import annotations

from tests.faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "wrapper/summon.py",
        "failed = any_rank(failed, data_parallel_groups(mesh))",
        "failed = bool(failed)",
        "With rank0_only a block that failed on the first rank is written back elsewhere.",
        ("wrapper/test_summon.py",),
    ),
    Fault(
        "wrapper/summon.py",
        "writeback=writeback and not failed",
        "writeback=writeback",
        "Edits of a block that raised are written back.",
        ("wrapper/test_summon.py",),
    ),
    Fault(
        "wrapper/initialization.py",
        "            state.data = received.to(state.device)  # expanded",
        "            state.detach().data = received.to(state.device)  # expanded",
        "sync_module_states leaves expanded parameters with the values of each rank.",
        ("wrapper/test_initial_state.py",),
    ),
    Fault(
        "wrapper/initialization.py",
        "in reversed(data_parallel_groups(mesh))",
        "in data_parallel_groups(mesh)[:1]",
        "Each replica starts from the values of its own first rank.",
        ("wrapper/test_initial_state.py",),
    ),
    Fault(
        "wrapper/initialization.py",
        "            replacement.requires_grad_(old.requires_grad)\n",
        "",
        "A frozen parameter is trained after it was materialized.",
        ("wrapper/test_initial_state.py",),
    ),
    Fault(
        "wrapper/fsdp.py",
        "        initializer.unclaimed.difference_update(inherited)",
        "        pass",
        "Synchronizing states overwrites the shards of a tied weight that a unit between owns with the first rank's.",
        ("wrapper/test_initial_state.py",),
    ),
    Fault(
        "wrapper/fsdp.py",
        "precision.cast_root_forward_inputs if self.check_is_root() else precision.cast_forward_inputs",
        "precision.cast_forward_inputs if self.check_is_root() else precision.cast_root_forward_inputs",
        "Inputs of the root are cast as those of other units should be.",
        ("wrapper/test_precision.py",),
    ),
    Fault(
        "wrapper/auto_wrap.py",
        "casts_around=True",
        "casts_around=False",
        "Batch norms get low-precision inputs, or hand on full-precision outputs.",
        ("wrapper/test_precision.py",),
    ),
    Fault(
        "wrapper/options.py",
        "        below.update(root.modules())\n",
        "        below.add(root)\n",
        "Children of an ignored module are sharded.",
        ("wrapper/test_ignored_modules.py",),
    ),
    Fault(
        "wrapper/state_dict/model.py",
        "first = mesh.rank == 0 and (mesh.replicate is None or mesh.replicate.get_local_rank() == 0)",
        "first = mesh.rank == 0",
        "With rank0_only the first rank of each replica holds a full state dict.",
        ("wrapper/test_state_dict.py",),
    ),
    Fault(
        "wrapper/state_dict/model.py",
        "copy=not live",
        "copy=False",
        "Training changes the buffers of a state dict that was saved before.",
        ("wrapper/test_state_dict.py",),
    ),
    Fault(
        "wrapper/state_dict/registered.py",
        "    compare({key: _kind(state.get(key)) for key in keys}, data_parallel_groups(unit.mesh), _different_keys)\n",
        "    pass\n",
        "Ranks load state dicts that differ in their keys, and some wait for ever.",
        ("wrapper/test_state_dict.py",),
    ),
    Fault(
        "wrapper/state_dict/optimizer_conversion.py",
        "            sent.copy_(local_shards[offsets])\n",
        "            sent.copy_(next(iter(local_shards.values())))\n",
        "The second region of a rank's ShardedTensor gets the values of the first one.",
        ("wrapper/test_optim_state.py",),
    ),
    Fault(
        "wrapper/state_dict/optimizer_conversion.py",
        "return 0 if mesh is None else int(mesh.mesh.flatten()[0])",
        "return 0",
        "A model on the second half of the ranks has nobody to save its optimizer with rank0_only.",
        ("wrapper/test_optim_state.py",),
    ),
    Fault(
        "frontend/sharded_module.py",
        "    mark_nested(subtree.in_nested_units)\n",
        "",
        "An inner wrapper takes itself for a root before the first forward.",
        ("wrapper/test_methods.py", "wrapper/test_comm_hooks.py"),
    ),
]
