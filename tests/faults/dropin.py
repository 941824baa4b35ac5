"""Faults in the drop-in replacement for ``torch.distributed.fsdp``."""

from tests.faults.fault import Fault

_INSTALL, _PROGRAM, _PIPELINING = (f"dropin/test_dropin_{name}.py" for name in ("install", "program", "pipelining"))

FAULTS: list[Fault] = [
    Fault(
        "dropin/inherit/sitecustomize.py",
        "            self._forget()\n",
        "            pass\n",
        "A process that cannot use fullshard goes on with torch's engine, beside ranks that run on fullshard.",
        (_PROGRAM,),
    ),
    Fault(
        "dropin/inherit/sitecustomize.py",
        "    run_hidden(seen)\n",
        "    pass\n",
        "The user's own sitecustomize does not run.",
        (_PROGRAM,),
    ),
    Fault(
        "dropin/inheritance.py",
        "os.pathsep.join([FOLDER, *_others()])",
        "FOLDER",
        "Processes that a program starts do not find what is in PYTHONPATH.",
        (_PROGRAM,),
    ),
    Fault(
        "dropin/installation.py",
        "            inheritance.restore_pythonpath()\n",
        "",
        "Processes that are started after uninstall() still run on fullshard.",
        (_INSTALL,),
    ),
    Fault(
        "dropin/installation.py",
        '            importlib.import_module("fullshard.ragged")  # programs that do not know fullshard cannot\n',
        "            pass\n",
        "An unchanged program cannot have the ragged layout: it raises as it shards.",
        ("engine/test_ragged.py",),
    ),
    Fault(
        "dropin/stand_ins.py",
        "        _refuse_torch(self._undo)\n",
        "",
        "A reference from before install() shards a part of the model with torch's engine.",
        (_INSTALL,),
    ),
    Fault(
        "dropin/stand_ins.py",
        "                self._give_back(vars(sys.modules[borrower]), asked, self._had_before[borrower])\n",
        "                pass\n",
        "Libraries that were imported meanwhile go on with fullshard after uninstall().",
        (_INSTALL,),
    ),
    Fault(
        "dropin/stand_ins.py",
        "    if vars(module).get(name) is ours:\n        vars(module)[name] = theirs\n",
        "    vars(module)[name] = theirs\n",
        "uninstall() replaces what a program has put in the place of one of torch's names.",
        (_INSTALL,),
    ),
    Fault(
        "dropin/split_backward.py",
        "for unit in units if not unit.registration.unsharded]",
        "for unit in units if unit.is_unsharded and not unit.registration.unsharded]",
        "Zero-bubble schedules leave weights that were resharded after forward without gradients.",
        (_PIPELINING,),
    ),
    Fault(
        "dropin/split_backward.py",
        "            parameter.accumulate_in_reduce_dtype()\n",
        "",
        "Zero-bubble schedules add up gradients in bf16.",
        (_PIPELINING,),
    ),
    Fault(
        "dropin/private_names.py",
        "        self._unit.write_back()\n",
        "",
        "accelerate's cast of parameters to fp32 reaches them only at some later forward.",
        ("dropin/test_dropin_private_names.py",),
    ),
    Fault(
        "dropin/patches.py",
        "            self._calls.discard(call)\n            if not self._calls:\n",
        "            self._calls.discard(call)\n            if True:\n",
        "The first of several users who is through takes torch's state dict functions away from the others.",
        ("wrapper/test_torch_state_dict.py",),
    ),
    Fault(
        "dropin/torch_state_dict.py",
        "    finally:\n        for optimizer in fresh:\n            optimizer.state.clear()\n    return state\n",
        "    finally:\n        pass\n    return state\n",
        "An optimizer whose state was looked at before the first step has state from then on.",
        ("wrapper/test_torch_state_dict.py",),
    ),
    Fault(
        "dropin/torch_state_dict.py",
        "            yield from parameter.fqns\n",
        "            yield parameter.fqn\n",
        "With ignore_frozen_params a frozen tied weight is saved under its second name.",
        ("wrapper/test_torch_state_dict.py", "dropin/test_dropin_state_dict.py"),
    ),
    Fault(
        "dropin/torch_state_dict.py",
        "        _check_complete(model, state_dict, info)\n",
        "        pass\n",
        "Loading a full state dict that lacks weights leaves their values without a word.",
        ("wrapper/test_torch_state_dict.py", "dropin/test_dropin_state_dict.py"),
    ),
]
