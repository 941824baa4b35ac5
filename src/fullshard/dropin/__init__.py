"""fullshard in the place of ``torch.distributed.fsdp``, for programs that import that.

    import fullshard.dropin

    fullshard.dropin.install()  # before or after the program's libraries were imported

or, without touching the program, ``python -m fullshard.dropin [-m] program args...``, also under ``torchrun``. Names
of torch's FSDP, old and new, and whatever torch and other libraries have bound of them, are fullshard's from then on,
until :func:`uninstall`. See docs/dropin.md.
"""

from fullshard.dropin.clients import SUPPORTED, UnsupportedClientError
from fullshard.dropin.errors import MixedEnginesError, MixedEnginesWarning, NotOfferedError
from fullshard.dropin.installation import Installation, install, installed, uninstall

__all__ = [
    "SUPPORTED",
    "Installation",
    "MixedEnginesError",
    "MixedEnginesWarning",
    "NotOfferedError",
    "UnsupportedClientError",
    "install",
    "installed",
    "uninstall",
]
