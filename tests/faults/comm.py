"""Faults in collectives: gloo's exchange, hosts, subgroups, quantization, collectives of users, what is recorded."""

from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "comm/base.py",
        "            with contextlib.suppress(RuntimeError):\n                work.wait()\n",
        "            pass\n",
        "What was issued before a collective that raises writes to memory that is used for something else by then.",
        ("engine/test_transports.py",),
    ),
    Fault(
        "comm/base.py",
        "            self.log.withdraw()  # other ranks wait for it\n",
        "            pass\n",
        "A rank that repeats a launch that could not be issued is taken for one that launches others.",
        ("engine/test_launch_log.py",),
    ),
    Fault(
        "comm/base.py",
        '    return (2 if kind == "all_reduce" else 1) * nbytes * (world_size - 1) // world_size\n',
        "    return nbytes * (world_size - 1) // world_size\n",
        "Records and reports show half of the bytes of an all-reduce.",
        ("engine/test_transports.py",),
    ),
    Fault(
        "comm/base.py",
        "            factor = scaling.before * scaling.after\n",
        "            factor = scaling.after\n",
        "On a single rank gradients are not divided by what is divided before a sum elsewhere.",
        ("engine/test_transports.py", "engine/test_collectives.py"),
    ),
    Fault(
        "comm/gloo.py",
        'operands, self._share, "waits"))\n',
        "operands, self._share))\n",
        "All-reduces over hosts are passed on behind all-gathers that nobody has sent yet, and ranks wait forever.",
        ("engine/test_hosts.py",),
    ),
    Fault(
        "comm/hosts.py",
        "            interrupted = error\n",
        "            raise error\n",
        "After Ctrl-C in a wait the memory is used again while another host's message is written to it.",
        ("engine/test_hosts.py",),
    ),
    Fault(
        "comm/groups.py",
        '            with _name_of_next_group(f"{group.group_name} {key} {record.made[key]}"):\n',
        "            with contextlib.nullcontext():\n",
        "Ranks that are in different numbers of groups wait for each other as they make a subgroup.",
        ("engine/test_transports.py",),
    ),
    Fault(
        "comm/groups.py",
        "or record.parts[key] not in distributed_c10d._world.pg_map:",
        "or False:",
        "A subgroup that was destroyed is used again.",
        ("engine/test_launch_log.py",),
    ),
    Fault(
        "comm/mesh.py",
        "        changed.exact_transport = shard if exact is None else exact\n",
        "        changed.exact_transport = shard\n",
        "Checkpoints of a model with quantized communication have rounded weights.",
        ("engine/test_quantized_training.py",),
    ),
    Fault(
        "comm/quantized/transport.py",
        "                spans.append((end, offset - end, False))\n",
        "                spans.append((end, offset - end, True))\n",
        "Small parameters, and numbers of ranks with gradients, are rounded with what lies beside them.",
        ("engine/test_quantized_blocks.py", "engine/test_quantized_training.py"),
    ),
    Fault(
        "comm/quantized/blocks.py",
        "            scale.masked_fill_(scale < _SMALLEST_SCALE, 0.0)\n",
        "",
        "Blocks of tiny gradients arrive as infinite ones.",
        ("engine/test_quantized_blocks.py",),
    ),
    Fault(
        "comm/quantized/transport.py",
        "sender = message[term - (term > rank)].unsqueeze(0)",
        "sender = message[term - (term >= len(message))].unsqueeze(0)",
        "A quantized reduce-scatter counts a neighbor's gradients twice and leaves another's out.",
        ("engine/test_quantized_blocks.py",),
    ),
    Fault(
        "comm/custom.py",
        "            target.copy_(result.view(-1))\n",
        "            pass\n",
        "What a communication hook has left in memory of its own is lost.",
        ("wrapper/test_comm_hooks.py",),
    ),
    Fault(
        "comm/custom.py",
        "            release(memory)\n",
        "            pass\n",
        "A custom collective with a pool of memory never gets any back.",
        ("engine/test_transports.py", "engine/test_custom_collectives.py"),
    ),
]
