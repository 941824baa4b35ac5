"""The default plan finds the blocks of many kinds of models, by their structure alone.

The models are built as those of well-known libraries are, with the same nesting and names, but compute nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fullshard.activation_checkpoint import checkpoint_wrapper
from fullshard.wrap import ModuleWrapPolicy, plan_blocks, plan_for
from models import Mlp


@functools.cache
def kind(name: str) -> type[nn.Module]:
    """A class of modules, which have whatever children they are given."""
    return type(name, (nn.Module,), {"forward": lambda self, x: x})


def make(name: str, **children: Any) -> nn.Module:
    """A module of the class ``name``; a list becomes an ``nn.ModuleList``."""
    module = kind(name)()
    for key, child in children.items():
        setattr(module, key, nn.ModuleList(child) if isinstance(child, list) else child)
    return module


def layer(width: int = 8, name: str = "Layer", **more: Any) -> nn.Module:
    return make(
        name, norm=nn.LayerNorm(width), up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width), **more
    )


def layers(count: int, **more: Any) -> list[nn.Module]:
    return [layer(**more) for _ in range(count)]


def gpt2() -> nn.Module:
    body = make("GPT2Model", wte=nn.Embedding(99, 8), wpe=nn.Embedding(4, 8), h=layers(3), ln_f=nn.LayerNorm(8))
    model = make("GPT2LMHeadModel", transformer=body, lm_head=nn.Linear(8, 99, bias=False))
    model.lm_head.weight = body.wte.weight
    return model


def llama(blocks: list[nn.Module]) -> nn.Module:
    body = make("LlamaModel", embed_tokens=nn.Embedding(99, 8), layers=blocks, norm=nn.LayerNorm(8))
    return make("LlamaForCausalLM", model=body, lm_head=nn.Linear(8, 99, bias=False))


def bert() -> nn.Module:
    embeddings = make("Embeddings", words=nn.Embedding(99, 8), positions=nn.Embedding(9, 8), norm=nn.LayerNorm(8))
    encoder, pooler = make("Encoder", layer=layers(3)), make("Pooler", dense=nn.Linear(8, 8))
    return make("Classifier", bert=make("Bert", embeddings=embeddings, encoder=encoder, pooler=pooler))


def t5() -> nn.Module:
    shared = nn.Embedding(99, 8)

    def stack(first: nn.Module) -> nn.Module:
        blocks = [make("Block", layer=[layer(bias=bias)]) for bias in (nn.Embedding(3, 2), None)]
        return make("Stack", embed_tokens=shared, block=blocks, final_layer_norm=first)

    halves = {"encoder": stack(nn.LayerNorm(8)), "decoder": stack(nn.LayerNorm(8))}
    return make("T5", shared=shared, **halves, lm_head=nn.Linear(8, 99, bias=False))


def swin() -> nn.Module:
    stages = [
        make("Stage", blocks=[layer(width, "SwinBlock") for _ in range(depth)], downsample=nn.Linear(width, 2 * width))
        for width, depth in ((8, 2), (16, 4), (32, 2))
    ]
    return make("Swin", layers=stages, norm=nn.LayerNorm(64), head=nn.Linear(64, 5))


def resnet() -> nn.Module:
    def stage(inner: int, outer: int, count: int = 2) -> nn.Sequential:
        first = make("Bottleneck", conv=nn.Conv2d(inner, outer, 3), down=nn.Sequential(nn.Conv2d(inner, outer, 1)))
        return nn.Sequential(first, *(make("Bottleneck", conv=nn.Conv2d(outer, outer, 3)) for _ in range(count - 1)))

    stages = {"layer1": stage(4, 4), "layer2": stage(4, 8), "layer3": stage(8, 32, 3), "layer4": stage(32, 64)}
    return make("ResNet", stem=nn.Conv2d(3, 4, 3), **stages, fc=nn.Linear(64, 10))


def named(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "tied": (gpt2, named("transformer.h", 3)),
    "llama": (
        lambda: llama(layers(3)),
        ["model.embed_tokens", *named("model.layers", 3), "model.norm + lm_head"],
    ),
    "bert": (bert, ["bert.embeddings.words", *named("bert.encoder.layer", 3)]),
    "t5": (
        t5,
        ["shared", *named("encoder.block", 2), *named("decoder.block", 2), "decoder.final_layer_norm + lm_head"],
    ),
    "experts": (
        lambda: llama([layer(mlp=make("Moe", experts=layers(8, name="Mlp"))) for _ in range(3)]),
        named("model.layers", 3),
    ),
    "one dense layer": (
        lambda: llama([layer(), layer(mlp=make("Moe", experts=layers(8, name="Mlp")))]),
        named("model.layers", 2),
    ),
    "one layer": (lambda: make("Model", layers=layers(1), head=nn.Linear(8, 5)), ["layers.0"]),
    "stages": (
        swin,
        [
            *named("layers.0.blocks", 2),
            *named("layers.1.blocks", 4),
            *named("layers.2.blocks", 2),
            "layers.2.downsample",
        ],
    ),
    "convolutions": (resnet, [*named("layer2", 2), *named("layer3", 3), *named("layer4", 2)]),
    "both halves": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        [*named("encoder.layers", 2), *named("decoder.layers", 2)],
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Embedding(99, 8), *layers(2), nn.LayerNorm(8), nn.Linear(8, 99)),
        ["0", "1", "2", "3 + 4"],
    ),
    "single layers": (lambda: Mlp(8, 16, 4), ["layers.0", "layers.1"]),
    "dict": (lambda: make("Model", layers=nn.ModuleDict({"a": layer(), "b": layer()})), ["layers.a", "layers.b"]),
    # The model calls what is in these layers; of experts ranks may call different ones.
    "layers without a forward": (
        lambda: make(
            "Model",
            layers=[nn.ModuleList([nn.LayerNorm(8), layer(), nn.Sequential(*layers(2))]) for _ in range(2)],
            routed=[nn.ModuleDict({"mixer": layer(), "experts": nn.ModuleList(layers(2))}) for _ in range(2)],
        ),
        ["layers.0.1", "layers.0.2", "layers.1.1", "layers.1.2", "routed.0.mixer", "routed.1.mixer"],
    ),
    "one called thrice": (lambda: make("Model", layers=[layer()] * 3, head=nn.Linear(8, 5)), ["layers.0"]),
    "wrapped": (
        lambda: llama([torch.compile(layer()), checkpoint_wrapper(layer()), layer()]),
        ["model.embed_tokens", *named("model.layers", 3), "model.norm + lm_head"],
    ),
    # What is read by other modules is no unit: weights of attention, and of a parametrized layer.
    "readers": (
        lambda: make(
            "Model",
            layers=layers(2),
            pool=nn.MultiheadAttention(16, 2),
            loose=nn.ParameterList([torch.zeros(999)]),
            last=parametrizations.weight_norm(nn.Linear(16, 16)),
        ),
        [*named("layers", 2), "pool", "last"],
    ),
    "no list": (
        lambda: make("Model", lstm=nn.LSTM(8, 8), loose=nn.ParameterList([torch.zeros(99)]), out=nn.Linear(8, 20)),
        ["lstm", "out"],
    ),
    "experts alone": (
        lambda: make("Model", first=nn.Linear(8, 8), experts=[nn.Linear(8, 8), nn.Linear(8, 8)]),
        ["first"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_of_models(name: str) -> None:
    """Blocks are found whatever the lists are nested in, and so are the large modules around them."""
    build, expected = MODELS[name]
    plan = plan_blocks(build())
    order = {name: index for index, name in enumerate(expected)}
    found = [entry.name.replace("_checkpoint_wrapped_module.", "") for entry in plan.entries]
    assert sorted(found, key=lambda name: order.get(name, -1)) == expected
    by_size = name in ("no list", "experts alone")
    assert plan.reason.startswith("units by size, of at least " if by_size else "repeated blocks: ")


def test_frozen_parts_and_devices_make_no_difference() -> None:
    """Neither do frozen parameters beside trainable ones, nor the meta device, nor what is sharded already."""
    with torch.device("meta"):
        model = llama(layers(3))
    names = [entry.name for entry in plan_blocks(model).entries]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    plan = plan_blocks(model)
    assert [entry.name for entry in plan.entries] == names and "model.layers.0" in plan.mixed_frozen()
    first = model.model.layers[0]
    with mock.patch("fullshard.wrap.tree.unit_of", lambda module: module if module is first else None):
        rest = plan_blocks(model, ignored_params=[model.lm_head.weight])
    assert [entry.name for entry in rest.entries] == ["model.embed_tokens", "model.layers.1", "model.layers.2"]


def test_report() -> None:
    """Blocks of one kind share a row; a reason follows."""
    model = llama(layers(4))
    model.model.layers[3].up.weight.requires_grad_(False)
    assert plan_blocks(model).explain(3) == (
        "unit                               class               elements  unsharded  of rank 0  notes\n"
        "model.embed_tokens                 Embedding                792    3.1 KiB    1.0 KiB\n"
        "model.layers.0 ... model.layers.2  Layer                3 x 568    2.2 KiB      816 B\n"
        "model.layers.3                     Layer                    568    2.2 KiB      816 B  "
        "mixed, frozen: model.layers.3.up.weight\n"
        "model.norm + lm_head               LayerNorm + Linear       808    3.2 KiB    1.1 KiB\n"
        "(root)                             LlamaForCausalLM           0        0 B        0 B  holds no parameters\n"
        "total                                                     3,872   15.1 KiB    5.3 KiB  "
        "7 units, the largest 3.2 KiB\n"
        "repeated blocks: 4 Layer in model.layers (59% of the elements)"
    )
    assert "of rank 0" not in str(plan_blocks(model))


def test_changed_plans() -> None:
    """A plan is a policy, and so is a dict of arguments by module or modules, with which units can be changed."""
    model = llama(layers(2))
    plan = plan_blocks(model)
    assert [u.name for u in plan_for(plan, model).units] == [u.name for u in plan.units]
    units = plan.modules
    del units[model.model.embed_tokens]
    units[model.model.layers[0]] = {"reshard_after_forward": False}
    changed = plan_for(units, model, root_kwargs={"mesh": None, "reshard_after_forward": True})
    assert [entry.name for entry in changed.entries] == ["model.layers.0", "model.layers.1", "model.norm + lm_head"]
    assert [entry.kwargs["reshard_after_forward"] for entry in changed.entries] == [False, True, True]
    assert changed.owners()[""] == [("model.embed_tokens.weight",)] and "reshard_after_forward=False" in str(changed)
    model.lm_head.weight = model.model.embed_tokens.weight
    tied = plan_for({(model.model.embed_tokens, model.lm_head): {}, model.model: {}}, model)
    assert tied.owners()["model.embed_tokens + lm_head"] == [("model.embed_tokens.weight", "lm_head.weight")]


def test_wrong_plans() -> None:
    """Plans of other models, and dicts that name no modules below this one or one twice, are refused."""
    model, other = llama(layers(2)), llama(layers(2))
    first, second = model.model.layers
    for wrong, message in (
        (plan_blocks(other), "expected a plan of this LlamaForCausalLM, found one of another model"),
        ({other.lm_head: {}}, "found a Linear that is not below it"),
        ({model: {}}, "found the model itself"),
        ({(first, second): {}, second: {}}, "each module in one unit, found 'model.layers.1' in two"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_for(wrong, model)
    with pytest.raises(TypeError, match="expected a dict of arguments for each unit, found True"):
        plan_for({first: True}, model)  # type: ignore[dict-item]
    assert plan_for(ModuleWrapPolicy({kind("Layer")}), model).reason == ""
