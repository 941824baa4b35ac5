"""In which form wrappers are saved and loaded: the settings themselves."""

from __future__ import annotations

import copy
import importlib
from dataclasses import asdict
from typing import Any

import pytest
from torch import nn
from wrapped import LOCAL, SHARDED, WHOLE, Net, raised_everywhere, wrapped

from fullshard import (
    FullOptimStateDictConfig,
    FullshardError,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from ranks import Rank, on_ranks

CONFIGS: list[tuple[Any, Any, Any]] = [
    (WHOLE, FullStateDictConfig, FullOptimStateDictConfig),
    (LOCAL, LocalStateDictConfig, LocalOptimStateDictConfig),
    (SHARDED, ShardedStateDictConfig, ShardedOptimStateDictConfig),
]


def test_fields_and_defaults() -> None:
    """Names, order and defaults are torch's; flags may be assigned to, and are checked then as well."""
    torchs = importlib.import_module("torch.distributed.fsdp")
    kinds = [kind for _, *pair in CONFIGS for kind in pair] + [StateDictConfig, OptimStateDictConfig]
    for kind in kinds:
        defaults = asdict(getattr(torchs, kind.__name__)())
        assert asdict(kind()) == defaults and list(asdict(kind())) == list(defaults)
        assigned = kind()
        assigned.offload_to_cpu = not defaults["offload_to_cpu"]
        assert assigned != kind() and assigned.offload_to_cpu is not defaults["offload_to_cpu"]
        with pytest.raises(
            AttributeError, match=f"{kind.__name__} has no field rank_0_only; its fields are offload_to_cpu"
        ):
            assigned.rank_0_only = True
        for name in defaults:
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name}: expected True or False, found None"):
                setattr(assigned, name, None)
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name}: expected True or False, found 1"):
                kind(**{name: 1})
    assert [member.name for member in StateDictType] == [member.name for member in torchs.StateDictType]
    assert [member.name for member in OptimStateKeyType] == ["PARAM_NAME", "PARAM_ID"]


def types_of(model: nn.Module) -> list[StateDictType]:
    return [wrapper._state_settings.state_dict_type for wrapper in FSDP.fsdp_modules(model)]


@on_ranks(1)
def test_set_and_get(rank: Rank) -> None:
    """All wrappers get copies of the settings, the old ones are returned; configs of other types are refused."""
    for kind, config, optim_config in CONFIGS:
        model, _ = wrapped(rank)
        default = StateDictSettings(WHOLE, FullStateDictConfig(), FullOptimStateDictConfig())
        assert FSDP.get_state_dict_type(model) == default == StateDictSettings()
        assert FSDP.set_state_dict_type(model, kind) == default
        given = (config(offload_to_cpu=True), optim_config(offload_to_cpu=False))
        assert FSDP.set_state_dict_type(model, kind, *given) == StateDictSettings(kind, config(), optim_config())
        assert FSDP.get_state_dict_type(model) == StateDictSettings(kind, *given)
        assert types_of(model) == [kind] * 3
        given[0].offload_to_cpu = False
        kept = StateDictSettings(kind, config(offload_to_cpu=True), given[1])
        assert FSDP.get_state_dict_type(model) == FSDP.get_state_dict_type(copy.deepcopy(model)) == kept
        for other in [c for _, c, _ in CONFIGS if c is not config] + [StateDictConfig]:
            found = rf"expected a {config.__name__} for {kind.name}, found a {other.__name__}"
            with pytest.raises(RuntimeError, match=found):
                FSDP.set_state_dict_type(model, kind, other())
        for other in [c for _, _, c in CONFIGS if c is not optim_config] + [OptimStateDictConfig]:
            found = rf"optim_state_dict_config: .*{optim_config.__name__}.*{other.__name__}"
            with pytest.raises(RuntimeError, match=found):
                FSDP.set_state_dict_type(model, kind, config(), other())
        assert FSDP.get_state_dict_type(model) == kept
    with pytest.raises(TypeError, match=r"expected a fullshard\.StateDictType, found 'full'"):
        FSDP.set_state_dict_type(model, "full")  # type: ignore[arg-type]


@on_ranks(1)
def test_parts_and_contexts(rank: Rank) -> None:
    """A root, plain or not, stands for the wrappers in it; a context gives each its own settings back."""
    model, _ = wrapped(rank)
    root, inner = nn.Sequential(nn.Linear(2, 2), model), model.module.blocks[1]
    FSDP.set_state_dict_type(root, SHARDED)
    assert FSDP.get_state_dict_type(root).state_dict_type is SHARDED and types_of(root) == [SHARDED] * 3
    assert FSDP.set_state_dict_type(Net(), SHARDED) == FSDP.get_state_dict_type(Net()) == StateDictSettings()
    with FSDP.state_dict_type(Net(), SHARDED):
        pass
    FSDP.set_state_dict_type(root, WHOLE)
    FSDP.set_state_dict_type(inner, LOCAL)
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(inner, WHOLE):
            assert types_of(model) == [SHARDED, SHARDED, WHOLE]
        assert types_of(model) == [SHARDED] * 3
    assert types_of(model) == [WHOLE, WHOLE, LOCAL]
    with pytest.raises(KeyError), FSDP.state_dict_type(model, SHARDED):
        raise KeyError
    assert types_of(model) == [WHOLE, WHOLE, LOCAL]


@on_ranks(2)
def test_differing_settings(rank: Rank) -> None:
    """They are reported with the names of the modules, and nothing is changed."""
    model, _ = wrapped(rank)
    FSDP.set_state_dict_type(model.module.blocks[1], WHOLE, FullStateDictConfig(rank0_only=True))
    asked: list[Any] = [lambda: FSDP.get_state_dict_type(model), lambda: FSDP.set_state_dict_type(model, SHARDED)]
    for ask in asked:
        with pytest.raises(FullshardError, match=r"in <root>, blocks\.0; .*rank0_only=True.* in blocks\.1") as caught:
            ask()
        raised_everywhere(rank, caught.value)
    assert types_of(model) == [WHOLE] * 3
    FSDP.set_state_dict_type(model.module.blocks[1], WHOLE)
    FSDP.set_state_dict_type(model, SHARDED)
