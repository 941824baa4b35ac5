"""Import from safetensors files: every form of model, byte ranges only, meta devices, names, and what is refused."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from weight_models import FORMS, Net, build, form, full_state

from compare import assert_equal
from fullshard import CPUOffloadPolicy, MixedPrecision, PhaseError, fully_shard, unsharded
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.checkpoint.format.host import HostBlocks
from fullshard.checkpoint.safetensors import importing
from fullshard.checkpoint.safetensors.export import export_safetensors
from fullshard.checkpoint.safetensors.files import INDEX_NAME, SINGLE_NAME
from fullshard.checkpoint.safetensors.importing import load_safetensors
from fullshard.checkpoint.safetensors.shard_io import ShardFileIO
from fullshard.checkpoint.safetensors.stream import full_tensors
from fullshard.checkpoint.state.parameters import local_parameters
from fullshard.errors import CheckpointError
from ranks import Rank, on_ranks

forms = pytest.mark.parametrize("name", FORMS)


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
    state = full_state(build(seed))
    state["blocks.0.calls"] = torch.tensor(11)
    return {name: value.contiguous() for name, value in state.items() if name != "head.weight"}


def tokens() -> torch.Tensor:
    """An input of the model."""
    return torch.arange(8).view(2, 4)


def assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The model's full tensors are these."""
    found = dict(full_tensors(model))
    for name, value in expected.items():
        assert_equal(found[name], value, name)
    if "head.weight" in found:
        assert_equal(found["head.weight"], found["words.weight"], "tied")


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


@on_ranks(1, 4)
@forms
def test_every_form_is_filled(rank: Rank, name: str, folder: str) -> None:
    """Every parameter and buffer has the file's value, and the model computes with it at once."""
    if name == "hybrid" and rank.world_size == 1:
        pytest.skip("two axes need two ranks")
    save(rank, folder, weights())
    model = form(name, rank, build())
    model(tokens())  # the root keeps its full parameters
    missing, unexpected = load_safetensors(model, folder)
    assert not missing and not unexpected
    assert_holds(model, weights())
    reference = build(2)
    assert_equal(model(tokens()), reference(tokens()), "output")


@on_ranks(4)
@pytest.mark.parametrize("name", ["fully_shard", "columns", "hybrid", "wrapper"])
def test_only_what_a_rank_holds_is_read(rank: Rank, name: str, folder: str) -> None:
    """Bytes read are those of the rank's own shards, be they rows or columns; nothing goes through other memory."""
    save(rank, folder, {k: v for k, v in weights().items() if k != "mix"})
    model = form(name, rank, build())
    held = sum(p.shards_of(p.parameter).nbytes for p in local_parameters(model) if p.fqn != "mix")
    buffers = sum(b.nbytes for n, b in build().named_buffers() if "cache" not in n)
    with pytest.MonkeyPatch.context() as patch:
        read = count_reads(patch)
        if name != "columns" and rank.device.type == "cpu":  # others cannot be read into directly
            patch.setattr(HostBlocks, "_host", lambda *_: pytest.fail("read into other memory"))
        load_safetensors(model, folder, strict=False)
    assert sum(read) == held + buffers


@on_ranks(2)
@pytest.mark.parametrize(("name", "block"), [("columns", 16), ("wrapper", 100)])
def test_other_dtypes_are_converted_in_blocks(rank: Rank, name: str, block: int, folder: str) -> None:
    """Files in another floating-point dtype, through blocks of any size; the same values as a cast of the whole."""
    in_file = {k: v.half() if v.is_floating_point() else v for k, v in weights().items()}
    save(rank, folder, in_file)
    model = form(name, rank, build())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardFileIO.__init__, "__defaults__", (block,))
        load_safetensors(model, folder)
    expected = {k: in_file[k].to(v.dtype) for k, v in weights().items()}
    assert_holds(model, expected)
    message = assert_refused(rank, model, folder, cast=False)
    assert "words.weight: torch.float16 in the files, torch.float32 in the model" in message


@on_ranks(4)
def test_what_another_form_has_exported_is_read(rank: Rank, folder: str) -> None:
    """Out of one form and into another, in several files."""
    export_safetensors(form("columns", rank, build(3)), folder, max_shard_bytes=400)
    model = form("wrapper, original", rank, build())
    for path in (folder, os.path.join(folder, INDEX_NAME)):
        assert load_safetensors(model, path) == ([], [])
        assert_holds(model, full_state(build(3)))
    dist.barrier()


@on_ranks(2)
def test_buffers_that_compute_in_another_dtype_are_filled(rank: Rank, folder: str) -> None:
    """A buffer that the wrapper has cast gets the file's value, rounded once; the file is not of another dtype."""
    save(rank, folder, weights())
    model = form("plain", rank, build())
    model = FSDP(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), process_group=rank.group)
    model(tokens())
    load_safetensors(model, folder, cast=False)
    assert_equal(model.module.blocks[0].offset, weights()["blocks.0.offset"].bfloat16(), "offset")


# -------------------------------------------------------------------- the meta device


def on_meta(**sizes: int) -> Net:
    with torch.device("meta"):
        return Net(**sizes)


@on_ranks(4)
@pytest.mark.parametrize("name", ["plain", "offloaded", "columns", "hybrid"])
def test_models_on_the_meta_device_get_memory_and_values(rank: Rank, name: str, folder: str) -> None:
    """Afterwards everything has its value, buffers that no file has are made by reset_parameters, and ties hold."""
    save(rank, folder, weights())
    if name == "offloaded":
        model: Any = fully_shard(on_meta(), mesh=rank.mesh, offload_policy=CPUOffloadPolicy())
    else:
        model = form(name, rank, on_meta())
    model.words.weight.note = "kept"
    torch.set_default_device(rank.device)  # for what is in no unit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_safetensors(model, folder)
    assert_holds(model, weights())
    assert model.head.weight is model.words.weight and model.words.weight.note == "kept"
    assert not model.mix.requires_grad
    for block in model.blocks:
        assert_equal(block.cache, torch.full((2,), 7.0), "cache")
    assert_equal(model(tokens()), build(2)(tokens()), "output")
    if name != "plain":
        model(tokens()).sum().backward()
        optimizer.step()
        assert not torch.equal(dict(full_tensors(model))["words.weight"], weights()["words.weight"])


@on_ranks(2)
def test_what_nothing_gives_a_value_is_listed(rank: Rank, folder: str) -> None:
    """On the meta device: parameters that the files lack, and buffers that nobody makes. The model stays there."""
    lacking = {k: v for k, v in weights().items() if k not in ("mix", "blocks.1.offset", "words.weight")}
    save(rank, folder, lacking)
    model = on_meta()
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    fully_shard(model, mesh=rank.mesh)
    shapes = {"words.weight (11, 6)", "mix (6, 5)", "blocks.1.offset (6,)"}
    for strict, expected in ((True, shapes), (False, {"words.weight", "mix"})):
        with pytest.raises(CheckpointError) as caught:
            load_safetensors(model, folder, strict=strict)
        lines = {line.strip() for line in str(caught.value).splitlines()}
        assert {"angles", *expected} <= lines and "blocks.0.cache" not in lines
        assert all(p.device.type == "meta" for p in (*model.parameters(), *model.buffers()))
    save(rank, folder, {**weights(), "angles": torch.arange(3.0)})
    load_safetensors(model, folder)
    assert_equal(model.angles, torch.arange(3.0), "a buffer that is not saved, but in the file")


class Rotary(nn.Module):
    """Frequencies that are computed, not saved, by nobody but the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool), persistent=False)


class Around(nn.Module):
    """A model that initializes its modules as those of Hugging Face transformers do."""

    fills = True

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary) and self.fills:
            module.frequencies.copy_(torch.arange(4.0))
            module.mask.zero_()


@on_ranks(2)
@pytest.mark.parametrize("how", ["around", "argument"])
def test_buffers_that_the_files_lack_are_initialized(rank: Rank, how: str, folder: str) -> None:
    """By the closest module around them that initializes others, or by what is passed."""
    save(rank, folder, {"0.linear.weight": torch.eye(3), "0.linear.bias": torch.ones(3)})
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(Around()), mesh=rank.mesh)
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


class Masked(nn.Linear):
    """Made with a mask, of which the ``reset_parameters`` that it inherits does not know, and an empty placeholder."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)
        self.register_buffer("cache", torch.empty(0), persistent=False)


class Forgetful(Around):
    """Initializes nothing."""

    fills = False


class Failing(Rotary):
    """Whose initialization fails."""

    def reset_parameters(self) -> None:
        raise RuntimeError("no idea")


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forgetful, r"did not set them: \['0\.rotary\.frequencies', '0\.rotary\.mask'\]; pass init_buffers"),
        (Masked, r"did not set them: \['0\.mask'\]"),
        (Failing, r"initialization of a Failing.*no idea"),
    ],
)
def test_buffers_that_are_not_initialized_are_an_error(
    rank: Rank, kind: type[nn.Module], says: str, folder: str
) -> None:
    """They would hold zeros, and the model would compute something else without a word."""
    save(rank, folder, {f"0.{name}": value for name, value in kind().state_dict().items()})
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(kind()), mesh=rank.mesh)
    with pytest.raises(CheckpointError, match=says):
        load_safetensors(model, folder)


class Replacing(nn.Module):
    """Frees its cache before it makes a new one, which then often has the address of the old one."""

    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.others = [] if other is None else [other]  # not submodules

    def reset_parameters(self) -> None:
        self.cache = None
        if not self.others:
            self.cache = torch.zeros(4)
        for other in self.others:
            other.kept = torch.ones(4)


class Zeroing(nn.Module):
    """Writes to all of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4, device="cpu"), persistent=False)
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def reset_parameters(self) -> None:
        self.kept.zero_()
        self.table.fill_(5)


@pytest.mark.parametrize("writes", ["zeros", "other"])
def test_buffers_that_replace_others(writes: str, folder: str) -> None:
    """What an initialization makes is not taken for what it freed: zeros are set, other modules' buffers kept."""
    save_file({"0.weight": torch.ones(2)}, Path(folder, SINGLE_NAME))
    with torch.device("meta"):
        zeroing = Zeroing()
        model = nn.Sequential(Replacing(zeroing if writes == "other" else None), zeroing)
    load_safetensors(model, folder)
    assert_equal(zeroing.kept, torch.ones(4), "kept")
    assert_equal(zeroing.table, torch.full((4,), 5.0), "table")
    if writes == "zeros":
        assert_equal(model[0].cache, torch.zeros(4), "cache")


class Shifted(nn.Module):
    """A parameter, and a table that is not saved, both made by reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), 7.0))
        self.child = nn.Linear(3, 2)
        self.register_buffer("table", torch.empty(3, device="meta"), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.zero_()
            self.child.weight.zero_()
        self.table.fill_(5)


@on_ranks(2)
def test_reset_keeps_what_the_files_lack(rank: Rank, folder: str) -> None:
    """Making a buffer leaves parameters of the module and its children alone, unless the files have them."""
    save(rank, folder, {"1.bias": torch.ones(2), "0.child.bias": torch.full((2,), 3.0)})
    model = nn.Sequential(Shifted(), nn.Linear(3, 2))
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
    assert_equal(model[0].table, torch.full((3,), 5.0), "table")


@on_ranks(2)
@pytest.mark.parametrize("name", ["partly", "ignored"])
def test_parameters_on_the_meta_device_stay_the_same_objects(rank: Rank, name: str, folder: str) -> None:
    """Those outside of units too, and those that RNNs keep once more: an optimizer that was made before trains all."""
    source = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    save(rank, folder, full_state(source))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
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
    with torch.device("meta"):
        model = nn.Linear(3, 2)
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
    other = {("head.weight" if k == "words.weight" else k): v for k, v in only.items()}
    for contents in (only, other, only | other):
        save(rank, folder, contents)
        model = form("fully_shard", rank, build())
        assert load_safetensors(model, folder) == ([], [])
        assert_holds(model, weights())


@on_ranks(2)
@pytest.mark.parametrize("metadata", [{"aliases": '{"head.weight": "words.weight"}'}, {"head.weight": "words.weight"}])
def test_models_that_are_not_tied_get_both(rank: Rank, metadata: dict[str, str], folder: str) -> None:
    """What the metadata says of further names fills a model in which the parameters are two."""
    model = build()
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    save(rank, folder, weights(), metadata)
    model = fully_shard(model, mesh=rank.mesh)
    assert load_safetensors(model, folder) == ([], [])
    assert_holds(model, {**weights(), "head.weight": weights()["words.weight"]})
    save(rank, folder, weights())
    assert "head.weight (11, 6)" in assert_refused(rank, model, folder)


@on_ranks(2)
def test_names_can_be_changed_on_the_way(rank: Rank, folder: str) -> None:
    """``rename`` maps names of the files to the model's; None leaves a tensor out; two of one name are refused."""
    model = form("wrapper", rank, build())
    contents = {f"model.{k}": v for k, v in weights().items()}
    save(
        rank, folder, {**contents, "vision": torch.ones(2)}, {"aliases": '{"model.head.weight": "model.words.weight"}'}
    )
    assert "\n    vision" in assert_refused(rank, model, folder)
    known = load_safetensors(model, folder, rename=lambda n: n.removeprefix("model.") if n != "vision" else None)
    assert known == ([], [])
    assert_holds(model, weights())
    assert "the same name, 'mix'" in assert_refused(rank, model, folder, rename=lambda name: "mix")
    with pytest.raises(TypeError, match="expected a name or None"):
        load_safetensors(model, folder, rename=lambda name: 3)  # type: ignore[arg-type, return-value]


@on_ranks(2)
def test_all_that_does_not_fit_is_listed(rank: Rank, folder: str) -> None:
    """Missing, unexpected, of another shape, of another dtype: each with its name and what was expected.

    Without ``strict`` what the files lack stays, and names on one side only are returned.
    """
    contents, old = weights(), full_state(build())
    del contents["blocks.0.up.bias"], contents["words.weight"]
    contents["more"] = torch.ones(1)
    save(rank, folder, {**contents, "mix": torch.ones(5, 6), "blocks.0.calls": torch.tensor(1.0)})
    model = form("wrapper", rank, build())
    message = assert_refused(rank, model, folder)
    for expected in (
        "not in the files:\n    words.weight (11, 6)\n    blocks.0.up.bias (13,)",
        "in the files, but not in the model:\n    more",
        "shape mismatch:\n    mix: (5, 6) in the files, (6, 5) in the model",
        "dtype mismatch:\n    blocks.0.calls: torch.float32 in the files, torch.int64 in the model",
    ):
        assert expected in message
    assert "mix" in assert_refused(rank, model, folder, strict=False)
    save(rank, folder, contents)
    result = load_safetensors(model, folder, strict=False)
    assert sorted(result.missing_keys) == ["blocks.0.up.bias", "words.weight"]
    assert result.unexpected_keys == ["more"]
    del contents["more"]
    assert_holds(model, {**contents, **{key: old[key] for key in result.missing_keys}})


# -------------------------------------------------------------------- what goes wrong


DAMAGES: dict[str, Callable[[bytes], bytes]] = {  # more in test_safetensors.py
    "truncated": lambda data: data[:-1],
    "pickle": lambda data: b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.",
}


@on_ranks(2)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_leave_the_model_untouched(rank: Rank, kind: str, folder: str) -> None:
    """Truncated, changed and hostile files are an error on all ranks, which names the file."""
    save(rank, folder, weights())
    file = Path(folder, SINGLE_NAME)
    if rank.rank == 0:
        file.write_bytes(DAMAGES[kind](file.read_bytes()))
    dist.barrier()
    assert SINGLE_NAME in assert_refused(rank, form("wrapper", rank, build()), folder)


@on_ranks(2)
@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "rank 1: .*elsewhere"),
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(3)},
            "rank 1 differs from rank 0 in the",
        ),
        (
            {"weight": torch.ones(2, 2).bfloat16(), "bias": torch.ones(2).bfloat16()},
            "rank 1 differs from rank 0 in the",
        ),
    ],
    ids=["nothing", "more", "other dtypes"],  # these with the same names, shapes and places
)
def test_ranks_that_find_other_files_are_told(
    rank: Rank, found: dict[str, torch.Tensor] | None, says: str, folder: str
) -> None:
    """Folders of one name on several machines, with different files in them: an error before anything changes."""
    save(rank, folder, {"weight": torch.ones(2, 2).half(), "bias": torch.ones(2).half()})
    usual, elsewhere = importing.find_weights, Path(folder, "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            if found is not None:
                elsewhere.mkdir()
                save_file(found, elsewhere / SINGLE_NAME)
            patch.setattr(importing, "find_weights", lambda _: usual(elsewhere))
        assert re.search(says, assert_refused(rank, fully_shard(nn.Linear(2, 2), mesh=rank.mesh), folder, strict=False))


@on_ranks(2)
def test_failure_while_reading_says_that_the_model_is_changed(rank: Rank, folder: str) -> None:
    """What nobody could have known before is told as what it is, on all ranks; loading again works."""
    save(rank, folder, weights())
    model = form("fully_shard", rank, build())
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(CheckpointError, match=r"rank 1: .*model.safetensors: .* The model is partly changed"):
            load_safetensors(model, folder)
    load_safetensors(model, folder)
    assert_holds(model, weights())


@on_ranks(2)
def test_models_in_the_middle_of_a_step_are_refused(rank: Rank, folder: str) -> None:
    """Not while full parameters are held."""
    save(rank, folder, weights())
    model = form("fully_shard", rank, build())
    with unsharded(model), pytest.raises(PhaseError):
        load_safetensors(model, folder)
    load_safetensors(model, folder)


def test_single_process_without_a_group(folder: str) -> None:
    """A plain model, no ranks at all, from a file by its name."""
    file, model = Path(folder, "mine.safetensors"), build()
    save_file(weights(), file)
    load_safetensors(model, file)
    for name, value in weights().items():
        assert_equal(model.state_dict()[name], value, name)
    with pytest.raises(ValueError, match="expected a local path, found the URL 's3://a/b'"):
        load_safetensors(model, "s3://a/b")
