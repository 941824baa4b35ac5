"""An emulated accelerator: a torch device in host memory whose streams, events and collectives are checked for races.

After :func:`register` there is a device type ``emulated`` (torch's PrivateUse1), with four devices, ``torch.emulated``,
``torch.accelerator`` and a c10d back end of NCCL's semantics for it. Kernels run at once, on the host; what a real
device may reorder is tracked by vector clocks, so that :func:`take_races` finds a missing event whatever the timing.

- ``source/state``        streams, clocks, late arrivals, and the check of every access to every byte
- ``source/device``       guard, events, the caching allocator, pinned memory, generators
- ``source/kernels``      every operation by its CPU kernel; host kernels that touch pinned memory
- ``source/collectives``  the c10d back end, over gloo
- ``build.py``            compiles them; ``device_module.py`` is ``torch.emulated``; ``races.py`` what tests ask for
"""

from __future__ import annotations

__all__ = ["BACKEND", "NAME", "register"]

NAME = "emulated"
BACKEND = "emulated_nccl"  # for ``init_process_group``; the back end says of itself that it is "nccl"


def register() -> None:
    """Make the device known to torch, in this process and for good. Compiles it if that was not done before."""
    import torch
    import torch.distributed as dist

    from accelerator import device_module
    from accelerator.native import native

    def collectives(options, _=None):
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        return native.Collectives(gloo, options.group_rank, options.group_size, "nccl", options.timeout)

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend(BACKEND, collectives, extended_api=True, devices=[NAME])
