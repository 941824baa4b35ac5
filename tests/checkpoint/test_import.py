"""Import from safetensors files: every kind of model, byte ranges only, meta devices, names, and what is refused."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from checkpoint.kinds import KINDS, Model, build, reference
from compare import assert_equal
from fullshard import CPUOffloadPolicy, PhaseError, fully_shard, unsharded
from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.safetensors import importing
from fullshard.checkpoint.safetensors.export import export_safetensors
from fullshard.checkpoint.safetensors.files import SINGLE_NAME
from fullshard.checkpoint.safetensors.importing import load_safetensors
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.checkpoint.safetensors.stream import full_tensors
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

TOKENS = torch.arange(8)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """With nothing in it."""
    return str(tmp_path)


def save(rank: Rank, folder: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """One file, written by the safetensors package on rank 0."""
    dist.barrier()
    if rank.rank == 0:
        contents = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(contents, Path(folder, SINGLE_NAME), metadata)
    dist.barrier()


def weights(seed: int = 2) -> dict[str, torch.Tensor]:
    """Other values than :func:`build` has, tied ones once."""
    return {name: value.contiguous() for name, value in reference(seed).items() if name != "head.weight"}


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The model's full tensors are these."""
    found = dict(full_tensors(model))
    for name, value in expected.items():
        assert_equal(found[name], value, name)
    if "head.weight" in found:
        assert_equal(found["head.weight"], found["embed.weight"], "tied")


def values(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds."""
    tensors = [*(p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()), *model.buffers()]
    return [tensor.detach().clone() for tensor in tensors]


def assert_refused(rank: Rank, model: nn.Module, *args: Any, **options: Any) -> str:
    """Loading raises the same on all ranks and changes nothing. Returns what it says."""
    before = values(model)
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load_safetensors(model, *args, **options)
    for old, new in zip(before, values(model), strict=True):
        assert_equal(new, old, "what was not to change")
    messages: list[str] = [""] * rank.world_size
    dist.all_gather_object(messages, str(caught.value))
    assert set(messages) == {messages[0]}
    return messages[0]


def count_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what this rank reads from now on, headers left out."""
    read: list[int] = []
    usual = os.preadv

    def preadv(descriptor: int, views: list[Any], offset: int) -> int:
        read.append(sum(len(view) for view in views))
        return usual(descriptor, views, offset)

    patch.setattr(os, "preadv", preadv)
    return read


# -------------------------------------------------------------------- values


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_filled(rank: Rank, kind: str, folder: str) -> None:
    """Every parameter and buffer has the file's value, and the model computes with it at once."""
    save(rank, folder, weights())
    model = build(rank, kind)
    computes = kind != "low_buffers"  # whose norm cannot
    if computes:
        model(TOKENS)  # the root keeps its full parameters
    assert load_safetensors(model, folder) == ([], [])
    assert_holds(model, weights())
    if computes:
        assert_equal(model(TOKENS), Model(2)(TOKENS), "output")


@on_ranks(4)
@pytest.mark.parametrize("kind", ["fully_shard", "columns", "hybrid", "flat"])
def test_only_what_a_rank_holds_is_read(rank: Rank, kind: str, folder: str) -> None:
    """Bytes read are those of the rank's own shards, be they rows or columns; nothing goes through other memory."""
    save(rank, folder, {k: v for k, v in weights().items() if k != "conv.weight"})
    model, plain = build(rank, kind), Model()
    held = sum(p.shards_of(p.parameter).nbytes for p in local_parameters(model) if p.fqn != "conv.weight")
    buffers = sum(b.nbytes for n, b in plain.named_buffers() if n != "fleeting")
    with pytest.MonkeyPatch.context() as patch:
        read = count_reads(patch)
        if kind != "columns" and rank.device.type == "cpu":  # others cannot be read into directly
            patch.setattr(HostBlocks, "_host", lambda *_: pytest.fail("read into other memory"))
        load_safetensors(model, folder, strict=False)
    assert sum(read) == held + buffers


@on_ranks(1, 2)
@pytest.mark.parametrize(("kind", "block"), [("columns", 16), ("flat", 100)])
def test_other_dtypes_are_converted_in_blocks(rank: Rank, kind: str, block: int, folder: str) -> None:
    """Files in another floating-point dtype, through blocks of any size; the same values as a cast of the whole."""
    in_file = {k: v.half() if v.is_floating_point() else v for k, v in weights().items()}
    save(rank, folder, in_file)
    model = build(rank, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardFileIO.__init__, "__defaults__", (block,))
        load_safetensors(model, folder)
    assert_holds(model, {k: in_file[k].to(v.dtype) for k, v in weights().items()})
    message = assert_refused(rank, model, folder, cast=False)
    assert "embed.weight: torch.float16 in the files, torch.float32 in the model" in message


@on_ranks(2)
def test_buffers_that_compute_in_another_dtype_are_filled(rank: Rank, folder: str) -> None:
    """A buffer that the wrapper has cast gets the file's value, rounded once; the file is not of another dtype."""
    save(rank, folder, weights())
    model = build(rank, "low_buffers")
    with pytest.raises(RuntimeError, match="BFloat16"):
        model(TOKENS)  # casts buffers, with which this norm cannot compute
    load_safetensors(model, folder, cast=False)
    assert_equal(model.module.norm.running_mean, weights()["norm.running_mean"].bfloat16(), "running_mean")


# -------------------------------------------------------------------- the meta device


def on_meta(module: Callable[[], nn.Module] = Model) -> Any:
    with torch.device("meta"):
        return module()


@on_ranks(4)
@pytest.mark.parametrize("kind", ["plain", "offloaded", "columns", "hybrid"])
def test_models_on_the_meta_device_get_memory_and_values(rank: Rank, kind: str, folder: str) -> None:
    """Afterwards everything has its value, buffers that no file has are made by reset_parameters, and ties hold."""
    save(rank, folder, weights())
    if kind == "offloaded":
        model: Any = fully_shard(on_meta(), mesh=rank.mesh, offload_policy=CPUOffloadPolicy())
    else:
        model = KINDS[kind](rank, on_meta())
    model.embed.weight.note = "kept"
    torch.set_default_device(rank.device)  # for what is in no unit
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    load_safetensors(model, folder)
    assert_holds(model, weights())
    assert model.head.weight is model.embed.weight and model.embed.weight.note == "kept"
    assert not model.frozen.requires_grad
    assert_equal(model.fleeting, torch.full((3,), 7.0), "fleeting")
    assert_equal(model(TOKENS), Model(2)(TOKENS), "output")
    if kind != "plain":
        model(TOKENS).square().sum().backward()
        optimizer.step()
        assert not torch.equal(dict(full_tensors(model))["embed.weight"], weights()["embed.weight"])


@on_ranks(2)
def test_what_nothing_gives_a_value_is_listed(rank: Rank, folder: str) -> None:
    """On the meta device: parameters that the files lack, and buffers that nobody makes. The model stays there."""
    lacking = {k: v for k, v in weights().items() if k not in ("frozen", "norm.running_mean", "embed.weight")}
    save(rank, folder, lacking)
    model = nn.Sequential(on_meta())
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    fully_shard(model, mesh=rank.mesh)
    rename = lambda name: name if name == "angles" else f"0.{name}"  # noqa: E731
    shapes = {"0.embed.weight (11, 6)", "0.frozen (7,)", "0.norm.running_mean (6,)"}
    for strict, expected in ((True, shapes), (False, {"0.embed.weight", "0.frozen"})):
        with pytest.raises(CheckpointError) as caught:
            load_safetensors(model, folder, strict=strict, rename=rename)
        lines = {line.strip() for line in str(caught.value).splitlines()}
        assert {"angles", *expected} <= lines and "0.fleeting" not in lines
        assert all(p.device.type == "meta" for p in (*model.parameters(), *model.buffers()))
    save(rank, folder, {**weights(), "angles": torch.arange(3.0)})
    load_safetensors(model, folder, rename=rename)
    assert_equal(model.angles, torch.arange(3.0), "a buffer that is not saved, but in the file")


class Rotary(nn.Module):
    """Buffers that are not saved, an empty one among them, and ``initialize`` as ``reset_parameters``."""

    def __init__(self, initialize: Callable[[Any], object] | None = None) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("cache", torch.empty(0), persistent=False)
        if initialize is not None:
            self.reset_parameters = partial(initialize, self)


class Around(nn.Module):
    """A model that initializes its modules as those of Hugging Face transformers do."""

    def __init__(self, initialize: Callable[[Any], object] | None = None, *, fills: bool = True) -> None:
        super().__init__()
        self.rotary, self.linear, self.fills = Rotary(initialize), nn.Linear(3, 3), fills

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary) and self.fills:
            module.frequencies.copy_(torch.arange(4.0))
            module.mask.zero_()


@on_ranks(2)
@pytest.mark.parametrize("how", ["around", "argument"])
def test_buffers_that_the_files_lack_are_initialized(rank: Rank, how: str, folder: str) -> None:
    """By the closest module around them that initializes others, or by what is passed."""
    save(rank, folder, {"0.linear.weight": torch.eye(3), "0.linear.bias": torch.ones(3)})
    model = fully_shard(nn.Sequential(on_meta(Around)), mesh=rank.mesh)
    calls: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        calls.append(module)
        module.frequencies.data.fill_(3)
        module.mask = torch.zeros(2, dtype=torch.bool, device=rank.device)

    load_safetensors(model, folder, init_buffers=fill if how == "argument" else None)
    expected = torch.full((4,), 3.0) if how == "argument" else torch.arange(4.0)
    assert_equal(model[0].rotary.frequencies, expected.to(rank.device), "frequencies")
    assert_equal(dict(full_tensors(model))["0.linear.weight"], torch.eye(3), "weight")
    assert calls == ([model[0].rotary] if how == "argument" else [])


UNSET: dict[str, tuple[Callable[[], Around], str]] = {
    "nothing": (
        lambda: Around(fills=False),
        r"did not set them: \['rotary\.frequencies', 'rotary\.mask'\]; pass init_",
    ),
    "less": (lambda: Around(lambda rotary: rotary.frequencies.fill_(1)), r"did not set them: \['rotary\.mask'\]"),
    "fails": (lambda: Around(lambda rotary: 1 / 0), r"initialization of a Rotary.*division by zero"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", UNSET)
def test_buffers_that_are_not_initialized_are_an_error(rank: Rank, what: str, folder: str) -> None:
    """They would hold zeros, and the model would compute something else without a word."""
    make, says = UNSET[what]
    save(rank, folder, make().state_dict())
    with pytest.raises(CheckpointError, match=says):
        load_safetensors(fully_shard(on_meta(make), mesh=rank.mesh), folder)


@pytest.mark.parametrize("writes", ["zeros", "other"])
def test_buffers_that_replace_others(writes: str, folder: str) -> None:
    """What an initialization makes is not taken for what it freed: zeros are set, other modules' buffers kept."""

    def replace(module: Any) -> None:
        module.frequencies = module.mask = None  # what is made next often has the same address
        if writes == "zeros":
            module.frequencies, module.mask = torch.zeros(4), torch.zeros(2, dtype=torch.bool)
        else:
            other.kept = torch.ones(4)

    def write(module: Any) -> None:
        module.kept.zero_()
        module.frequencies.fill_(5)
        module.mask.zero_()

    save_file({"2.weight": torch.ones(1, 1), "2.bias": torch.ones(1)}, Path(folder, SINGLE_NAME))
    other = on_meta(lambda: Rotary(write))
    other.register_buffer("kept", torch.ones(4), persistent=False)
    model = nn.Sequential(on_meta(lambda: Rotary(replace)), other, nn.Linear(1, 1))
    load_safetensors(model, folder)
    assert_equal(other.kept, torch.ones(4), "kept")
    assert_equal(other.frequencies, torch.full((4,), 5.0), "written")
    assert_equal(model[0].frequencies, torch.zeros(4) if writes == "zeros" else None, "replaced")


@on_ranks(2)
def test_initialization_of_buffers_keeps_parameters_that_the_files_lack(rank: Rank, folder: str) -> None:
    """Making a buffer leaves parameters of the module and its children alone, unless the files have them."""

    def reset(module: Any) -> None:
        for tensor in (module.weight, module.child.weight, module.mask):
            tensor.zero_()
        module.frequencies.fill_(5)

    save(rank, folder, {"1.bias": torch.ones(2), "0.child.bias": torch.full((2,), 3.0)})
    model: Any = nn.Sequential(on_meta(lambda: Rotary(reset)), nn.Linear(3, 2))
    model[0].weight, model[0].child = nn.Parameter(torch.full((4, 3), 7.0)), nn.Linear(3, 2)
    model[0].second = model[1]  # tied: its first name is inside of the module
    with torch.no_grad():
        model[0].child.weight.fill_(2)
    fully_shard(model, mesh=rank.mesh)
    load_safetensors(model, folder, strict=False, rename=lambda old: old.replace("1.", "0.second."))
    found = dict(full_tensors(model))
    assert_equal(found["0.weight"], torch.full((4, 3), 7.0), "weight")
    assert_equal(found["0.child.weight"], torch.full((2, 3), 2.0), "the child's")
    assert_equal(found["0.child.bias"], torch.full((2,), 3.0), "from the file")
    assert_equal(found["1.bias"], torch.ones(2), "from the file")
    assert_equal(model[0].frequencies, torch.full((4,), 5.0), "frequencies")


@on_ranks(2)
@pytest.mark.parametrize("name", ["partly", "ignored"])
def test_parameters_on_the_meta_device_stay_the_same_objects(rank: Rank, name: str, folder: str) -> None:
    """Those outside of units too, and those that RNNs keep once more: an optimizer that was made before trains all."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))  # noqa: E731
    source, model = make(), on_meta(make)
    save(rank, folder, source.state_dict())
    if name == "partly":
        fully_shard(model[0], mesh=rank.mesh)
    else:
        fully_shard(model, mesh=rank.mesh, ignored_params={model[0].weight})
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0, foreach=False)  # which cannot have both kinds
    torch.set_default_device(rank.device)  # for what is in no unit
    load_safetensors(model, folder)
    assert all(parameters[key] is each for key, each in model.named_parameters())
    before = {key: value.clone() for key, value in full_tensors(model)}
    output = model(torch.ones(2, 4))[0]
    torch.testing.assert_close(output, source(torch.ones(2, 4))[0])
    output.sum().backward()
    optimizer.step()
    for key, value in full_tensors(model):
        assert not torch.equal(value, before[key]), key


def test_parameters_that_cannot_stay_are_an_error(folder: str) -> None:
    """Something has a weak reference to a parameter: it is named, rather than replaced behind an optimizer's back."""
    export_safetensors(nn.Linear(3, 2), folder)
    model = on_meta(lambda: nn.Linear(3, 2))
    parameter, reference = model.weight, weakref.ref(model.weight)
    with pytest.raises(CheckpointError, match=r"weight is on the meta device .* in place"):
        load_safetensors(model, folder)
    assert reference() is parameter is model.weight
    del reference
    load_safetensors(model, folder)
    assert model.weight is parameter and parameter.device.type == "cpu"


# -------------------------------------------------------------------- names


@on_ranks(2)
def test_tied_parameters_need_one_of_their_names(rank: Rank, folder: str) -> None:
    """Under the first name, another one, or both."""
    only = weights()
    other = {("head.weight" if k == "embed.weight" else k): v for k, v in only.items()}
    for contents in (only, other, only | other):
        save(rank, folder, contents)
        model = build(rank, "fully_shard")
        assert load_safetensors(model, folder) == ([], [])
        assert_holds(model, weights())


@on_ranks(2)
@pytest.mark.parametrize(
    "metadata", [{"aliases": '{"head.weight": "embed.weight"}'}, {"head.weight": "embed.weight"}], ids=["our", "other"]
)
def test_models_that_are_not_tied_get_both(rank: Rank, metadata: dict[str, str], folder: str) -> None:
    """What the metadata says of further names fills a model in which the parameters are two."""
    model = Model()
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    save(rank, folder, weights(), metadata)
    model = fully_shard(model, mesh=rank.mesh)
    assert load_safetensors(model, folder) == ([], [])
    assert_holds(model, {**weights(), "head.weight": weights()["embed.weight"]})
    save(rank, folder, weights())
    assert "head.weight (11, 6)" in assert_refused(rank, model, folder)


@on_ranks(2)
def test_names_can_be_changed(rank: Rank, folder: str) -> None:
    """``rename`` maps names of the files to the model's; None leaves a tensor out; two of one name are refused."""
    model = build(rank, "flat")
    contents = {f"model.{k}": v for k, v in weights().items()} | {"vision": torch.ones(2)}
    save(rank, folder, contents, {"aliases": '{"model.head.weight": "model.embed.weight"}'})
    assert "\n    vision" in assert_refused(rank, model, folder)
    known = load_safetensors(model, folder, rename=lambda n: n.removeprefix("model.") if n != "vision" else None)
    assert known == ([], [])
    assert_holds(model, weights())
    assert "the same name, 'low'" in assert_refused(rank, model, folder, rename=lambda name: "low")
    with pytest.raises(TypeError, match="expected a name or None"):
        load_safetensors(model, folder, rename=lambda name: 3)  # type: ignore[arg-type, return-value]


@on_ranks(2)
def test_all_that_does_not_fit_is_listed(rank: Rank, folder: str) -> None:
    """Missing, unexpected, of another shape, of another dtype: each with its name and what was expected.

    Without ``strict`` what the files lack stays, and names on one side only are returned.
    """
    contents, old = weights(), reference()
    del contents["blocks.0.0.bias"], contents["embed.weight"]
    contents["more"] = torch.ones(1)
    save(rank, folder, {**contents, "frozen": torch.ones(5, 6), "counts": torch.ones(4)})
    model = build(rank, "flat")
    message = assert_refused(rank, model, folder)
    for expected in (
        "not in the files:\n    embed.weight (11, 6)\n    blocks.0.0.bias (9,)",
        "in the files, but not in the model:\n    more",
        "shape mismatch:\n    frozen: (5, 6) in the files, (7,) in the model",
        "dtype mismatch:\n    counts: torch.float32 in the files, torch.int64 in the model",
    ):
        assert expected in message
    assert "frozen" in assert_refused(rank, model, folder, strict=False)
    save(rank, folder, contents)
    result = load_safetensors(model, folder, strict=False)
    assert sorted(result.missing_keys) == ["blocks.0.0.bias", "embed.weight"]
    assert result.unexpected_keys == ["more"]
    del contents["more"]
    assert_holds(model, {**contents, **{key: old[key] for key in result.missing_keys}})


# -------------------------------------------------------------------- what goes wrong


@on_ranks(2)
def test_damaged_files_leave_the_model_untouched(rank: Rank, folder: str) -> None:
    """Truncated and hostile files are an error on all ranks, which names the file; test_safetensors.py has more."""
    save(rank, folder, weights())
    model, file = build(rank, "flat"), Path(folder, SINGLE_NAME)
    for data in (file.read_bytes()[:-1], b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."):
        dist.barrier()
        if rank.rank == 0:
            file.write_bytes(data)
        dist.barrier()
        assert SINGLE_NAME in assert_refused(rank, model, folder)


@on_ranks(2)
@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "rank 1: .*elsewhere"),
        ({"more": torch.ones(3)}, "rank 1 differs from rank 0 in the"),
        ({"weight": torch.ones(2, 2).bfloat16()}, "rank 1 differs from rank 0 in the"),
    ],
    ids=["nothing", "more", "other dtypes"],  # these with the same names, shapes and places
)
def test_ranks_must_see_the_same_files(
    rank: Rank, found: dict[str, torch.Tensor] | None, says: str, folder: str
) -> None:
    """Folders of one name on several machines, with different files in them: an error before anything changes."""
    first = {"weight": torch.ones(2, 2).half(), "bias": torch.ones(2).half()}
    save(rank, folder, first)
    usual, elsewhere = importing.find_weights, Path(folder, "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            if found is not None:
                elsewhere.mkdir()
                save_file({**first, **found}, elsewhere / SINGLE_NAME)
            patch.setattr(importing, "find_weights", lambda _: usual(elsewhere))
        assert re.search(says, assert_refused(rank, fully_shard(nn.Linear(2, 2), mesh=rank.mesh), folder, strict=False))


@on_ranks(2)
def test_failure_while_reading_says_that_the_model_is_changed(rank: Rank, folder: str) -> None:
    """On all ranks; loading again works. A model in the middle of a step is refused before."""
    save(rank, folder, weights())
    model = build(rank, "fully_shard")
    with unsharded(model), pytest.raises(PhaseError):
        load_safetensors(model, folder)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(CheckpointError, match=r"rank 1: .*model.safetensors: .* The model is partly changed"):
            load_safetensors(model, folder)
    load_safetensors(model, folder)
    assert_holds(model, weights())


def test_single_process_without_a_group(folder: str) -> None:
    """A plain model, no ranks at all, from a file by its name."""
    file, model = Path(folder, "mine.safetensors"), Model()
    save_file(weights(), file)
    load_safetensors(model, file)
    for name, value in weights().items():
        assert_equal(model.state_dict()[name], value, name)
    with pytest.raises(ValueError, match="expected a local path, found the URL 's3://a/b'"):
        load_safetensors(model, "s3://a/b")
