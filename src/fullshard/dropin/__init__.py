"""Drop-in replacement of ``torch.distributed.fsdp``, for programs that import that.

    import fullshard.dropin

    fullshard.dropin.install()  # before or after the program's libraries were imported

or, without changing the program, ``python -m fullshard.dropin [-m] program args...``, also under ``torchrun``. All
names of torch's FSDP1 and FSDP2, also those that torch and other libraries have imported, are fullshard's from then on,
until :func:`uninstall`; docs/integrations/drop_in.md has the list.
:func:`enable_torch_state_dict_functions` is useful without the rest: it makes
torch's checkpoint functions support fullshard's ``FullyShardedDataParallel``.
"""

from fullshard.dropin.clients import SUPPORTED, UnsupportedClientError
from fullshard.dropin.errors import MixedEnginesError, MixedEnginesWarning, NotOfferedError
from fullshard.dropin.installation import Installation, install, installed, uninstall
from fullshard.dropin.torch_state_dict import enable_torch_state_dict_functions

__all__ = [
    "SUPPORTED",
    "Installation",
    "MixedEnginesError",
    "MixedEnginesWarning",
    "NotOfferedError",
    "UnsupportedClientError",
    "enable_torch_state_dict_functions",
    "install",
    "installed",
    "uninstall",
]
