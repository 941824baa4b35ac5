from .errors import MixedEnginesError, MixedEnginesWarning, NotOfferedError
from .installation import install, installed, uninstall
from .torch_state_dict import enable_torch_state_dict_functions

__all__ = [
    "MixedEnginesError",
    "MixedEnginesWarning",
    "NotOfferedError",
    "enable_torch_state_dict_functions",
    "install",
    "installed",
    "uninstall",
]
