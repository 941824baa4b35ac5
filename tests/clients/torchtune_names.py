"""torchtune with a torchao that is newer than it.

torchtune 0.6.1 runs unmodified with torchao up to 0.15. Later ones moved NF4 (``torchao.dtypes.nf4tensor``) and dropped
three names that only torchtune's quantizers for inference use. The clients' environment has one torchao, a newer one:
importing this module imports torchtune with the old names in place. Those dropped are taken away again, for other
programs look for them. Does nothing more than the import with a torchao that has them.

Run as a program, it runs the script that its first argument names: ``python torchtune_names.py script args...``.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys

DROPPED = {
    "torchao.dtypes": ("TensorCoreTiledLayout",),
    "torchao.quantization": ("int4_weight_only", "int8_dynamic_activation_int4_weight"),
}


def _import() -> None:
    if importlib.util.find_spec("torchtune") is None:
        raise ImportError("no torchtune is installed")
    try:
        importlib.import_module("torchao.dtypes.nf4tensor")
    except ModuleNotFoundError:
        tensor = importlib.import_module("torchao.quantization").NF4Tensor
        sys.modules["torchao.dtypes.nf4tensor"] = sys.modules[tensor.__module__]
    lent = []
    for module, names in DROPPED.items():
        for name in names:
            if not hasattr(importlib.import_module(module), name):
                setattr(sys.modules[module], name, None)
                lent.append((sys.modules[module], name))
    try:
        importlib.import_module("torchtune.training")
    finally:
        for holder, name in lent:
            delattr(holder, name)


_import()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
