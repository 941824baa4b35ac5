"""Faults in optimizers on local tensors, norms, Muon and the gradient scaler."""

from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "optim/local/localize.py",
        "        args[:] = args.args\n",
        "",
        "A hook after the step that asks its arguments for the optimizer finds one without parameters.",
        ("optim/test_localize.py",),
    ),
    Fault(
        "optim/local/localize.py",
        "replaced = vars(optimizer), {**WITHOUT_HOOKS, _STEP: None}",
        "replaced = vars(optimizer), {_STEP: None}",
        "Loading a checkpoint before the first step runs the user's hooks on steps.",
        ("checkpoint/test_optimizer_state.py",),
    ),
    Fault(
        "optim/norms.py",
        "        return sums.sum().pow(1 / order).to(self.dtype)\n",
        "        return sums.max().pow(1 / order).to(self.dtype)\n",
        "The norm of a model with parameters on several meshes is that of the parameters on one of them.",
        ("optim/test_norms.py",),
    ),
    Fault(
        "optim/norms.py",
        "counts = [axis in axes or first for axes in axes_of_sums]",
        "counts = [True for axes in axes_of_sums]",
        "Replicated gradients count once for every replica in the norm.",
        ("optim/test_norms.py",),
    ),
    Fault(
        "optim/norms.py",
        "            found[1] = stacked.isnan().any()\n",
        "",
        "The largest gradient of a model with a NaN is finite on some back ends.",
        ("optim/test_norms.py",),
    ),
    Fault(
        "optim/norms.py",
        "scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)",
        "scale = float(max_norm) / (total_norm + 1e-6)",
        "Small gradients are scaled up.",
        ("optim/test_norms.py",),
    ),
    Fault(
        "optim/grad_scaler.py",
        "        dist.all_reduce(report, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        "A rank whose shards are finite steps, while another one skips the step.",
        ("wrapper/test_grad_scaler.py",),
    ),
    Fault(
        "optim/muon/matrix_optimizer.py",
        "            if exchange.matrices[index].parameter.grad is not None:\n",
        "            if exchange.matrices[index].parameter.requires_grad:\n",
        "A matrix of which no rank has a gradient decays.",
        ("optim/test_matrix_optimizer.py",),
    ),
    Fault(
        "optim/muon/exchange.py",
        "heaviest_first = sorted(range(len(work)), key=lambda index: (-work[index], index))",
        "heaviest_first = list(range(len(work)))",
        "One rank orthogonalizes far more than the others, which wait for it.",
        ("optim/test_matrix_optimizer.py", "optim/test_muon.py"),
    ),
    Fault(
        "optim/local/step.py",
        "elif isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.dim()):",
        "elif isinstance(value, DTensor):",
        "A fused optimizer takes the beginning of an unsharded tensor for this rank's state.",
        ("engine/test_ragged.py",),
    ),
    Fault(
        "optim/muon/matrix_optimizer.py",
        "                if key[0] is None or matrix.is_on_one_rank:\n",
        "                if key[0] is None:\n",
        "Muon sends matrices that are whole on a rank.",
        ("engine/test_ragged.py",),
    ),
]
