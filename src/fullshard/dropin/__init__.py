"""Drop-in replacement for ``torch.distributed.fsdp``, for programs that import that.

Call ``fullshard.dropin.install()`` before or after the program imports its libraries, or start the program unchanged
with ``python -m fullshard.dropin [-m] program args...``, also under ``torchrun``. All names of torch's FSDP1 and FSDP2,
also those that torch and other libraries have already imported, then refer to fullshard, until ``uninstall()``.
``docs/integrations/drop_in.md`` lists the names.

``enable_torch_state_dict_functions()`` is useful alone: it makes torch's checkpoint functions support fullshard's
``FullyShardedDataParallel``. ``enable_ragged_placements()`` makes torch's functions for DTensors support the placements
of ``fully_shard(layout="ragged")``.
"""

from fullshard.dropin.clients import SUPPORTED, UnsupportedClientError
from fullshard.dropin.errors import MixedEnginesError, MixedEnginesWarning, NotOfferedError
from fullshard.dropin.installation import Installation, install, installed, uninstall
from fullshard.dropin.ragged_placements import enable_ragged_placements
from fullshard.dropin.torch_state_dict import enable_torch_state_dict_functions

__all__ = [
    "SUPPORTED",
    "Installation",
    "MixedEnginesError",
    "MixedEnginesWarning",
    "NotOfferedError",
    "UnsupportedClientError",
    "enable_ragged_placements",
    "enable_torch_state_dict_functions",
    "install",
    "installed",
    "uninstall",
]
