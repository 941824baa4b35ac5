"""Drop-in replacement for ``torch.distributed.fsdp``, for programs that import that.

Call ``fullshard.dropin.install()`` before or after the program imports its libraries, or start the program unchanged
with ``python -m fullshard.dropin [-m] program args...``, also under ``torchrun``. All names of torch's FSDP1 and FSDP2,
also those that torch and other libraries have already imported, then refer to fullshard, until ``uninstall()``.
``docs/integrations/drop_in.md`` lists the names.

``enable_torch_state_dict_functions()`` is useful alone: it makes torch's checkpoint functions support fullshard's
``FullyShardedDataParallel``.

Names are imported when they are first used: ``python -m fullshard.dropin`` starts the program without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
