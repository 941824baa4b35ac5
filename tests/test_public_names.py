"""The public names: those of the stub, imported when they are used."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard

STUB = Path(fullshard.__file__).with_suffix(".pyi")


def stated() -> list[str]:
    """``__all__`` as the stub states it."""
    assigned = (each for each in ast.parse(STUB.read_text()).body if isinstance(each, ast.Assign))
    (names,) = (ast.literal_eval(each.value) for each in assigned)
    return list(names)


def test_all_is_what_the_stub_states() -> None:
    """Type checkers and ``import *`` see the same names, each of which there is; parts of the package are not among."""
    assert sorted(fullshard.__all__) == stated() == sorted(stated())
    assert all(getattr(fullshard, name) is not None for name in stated())
    assert set(stated()) <= set(dir(fullshard))


def test_parts_are_imported_when_they_are_used() -> None:
    """``import fullshard`` alone imports no torch, and none of the parts, which are there all the same."""
    code = "import sys, fullshard; assert not {'torch', 'fullshard.engine', 'fullshard.optim'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert fullshard.optim.localize and fullshard.engine


def test_unknown_names_are_attribute_errors() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no_such_name"):
        fullshard.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="no_such_name"):
        from fullshard import no_such_name  # noqa: F401
    assert pickle.loads(pickle.dumps(fullshard.fully_shard)) is fullshard.fully_shard
