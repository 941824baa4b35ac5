"""Which rank holds which part of a weight on three meshes of 8 ranks, and which ranks exchange what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from pictures import style
from pictures.style import Palette

SLOW = False
RANKS, ROWS, COLUMNS = 8, 16, 8
MESHES = ("shard", "hsdp", "tensor")


def record(ranks: Iterable[int] = range(RANKS)) -> dict[str, Any]:
    """Per mesh: each rank's rows of a weight that was sharded there, and the ranks of each collective of a step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: dict[str, Any] = {name: {"rows": {}, "groups": {}} for name in MESHES}
    threads = torch.get_num_threads()
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            for name in MESHES:
                rows, groups = _on(name)
                found[name]["rows"][str(rank)] = rows
                for kind, members in groups:
                    known = found[name]["groups"].setdefault(kind, [])
                    if members not in known:
                        known.append(members)
        finally:
            dist.destroy_process_group()
            torch.set_num_threads(threads)
    return {"weight": [ROWS, COLUMNS], "meshes": found}


def _on(name: str) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """This rank's first row and the one after its last, and its collectives with their ranks."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from fullshard import fully_shard

    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(
            torch.arange(ROWS).unsqueeze(1).expand(ROWS, COLUMNS)
        )  # so that each row says which it is
    groups: list[tuple[str, list[int]]] = []
    if name == "shard":
        mesh = init_device_mesh("cpu", (RANKS,))
    elif name == "hsdp":
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
        groups.append(("tensor parallel", sorted(both["tp"].mesh.flatten().tolist())))
        mesh = both["dp"]
    fully_shard(model, mesh=mesh)
    with _watched() as launches:
        model(torch.ones(2, COLUMNS)).sum().backward()
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    held = weight.to_local()[:, 0].int().tolist()
    assert held == list(range(held[0], held[-1] + 1))
    return [held[0], held[-1] + 1], groups + launches


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[str, list[int]]]]:
    """The kind and the ranks of each launch of a transport, as long as the block lasts."""
    import torch.distributed as dist

    from fullshard.comm import Transport

    found: list[tuple[str, list[int]]] = []

    def noting(kind: str, launch: Any) -> Any:
        def noted(transport: Any, requests: Any) -> Any:
            if transport.world_size > 1:
                found.append((kind, sorted(dist.get_process_group_ranks(transport.group))))
            return launch(transport, requests)

        return mock.patch.object(Transport, kind, noted)

    with contextlib.ExitStack() as stack:
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            stack.enter_context(noting(kind, getattr(Transport, kind)))
        yield found


# ------------------------------------------------------------------ the drawing

SIDE, STRIP = 1.15, 2.6  # inches of a weight
TOP = 1.7


def draw(data: Any, palette: Palette) -> Any:
    figure, axis = style.canvas(5.7)
    style.heading(
        figure,
        palette,
        "8 ranks, three meshes: who holds which rows of a weight",
        "Numbers are ranks. Each strip is that rank's part.",
    )
    drawn = data["meshes"]
    _one(axis, palette, drawn["shard"], 0.15)
    _hybrid(axis, palette, drawn["hsdp"], 3.0)
    _tensor(axis, palette, drawn["tensor"], 6.3)
    style.caption(
        figure,
        palette,
        "Ranks, rows and groups are those of a 16 x 8 weight of an nn.Linear, sharded by fullshard on each mesh.",
    )
    return figure


def _titles(axis: Any, palette: Palette, x: float, title: str, call: str) -> None:
    axis.text(x, 0.98, title, fontsize=12, fontweight="bold", color=palette.text)
    axis.text(x, 1.22, call, fontsize=8, family="DejaVu Sans Mono", color=palette.muted)


def _strips(axis: Any, palette: Palette, rows: Any, ranks: list[int], x: float, colors: Any) -> None:
    """A weight, cut into the parts of these ranks."""
    for rank in ranks:
        first, last = (STRIP * row / ROWS for row in rows[str(rank)])
        fill, ink = colors(rank)
        style.box(axis, x, TOP + first, SIDE, last - first, fill, edgecolor=palette.background, linewidth=1.5)
        axis.text(
            x + SIDE / 2, TOP + (first + last) / 2, str(rank), ha="center", va="center", color=ink, fontweight="bold"
        )


def _bracket(axis: Any, palette: Palette, x: float, top: float, bottom: float, left: bool = False) -> None:
    out = -0.1 if left else 0.1
    axis.plot([x, x + out, x + out, x], [top, top, bottom, bottom], color=palette.muted, linewidth=1.3)


def _below(
    axis: Any, palette: Palette, x: float, entries: list[tuple[str, str]], y: float = TOP + STRIP + 0.32
) -> None:
    """What is exchanged, and among whom: two lines each."""
    for what, groups in entries:
        axis.text(x, y, what, fontsize=10, color=palette.text)
        axis.text(x, y + 0.2, groups, fontsize=9.5, color=palette.muted)
        y += 0.47


def _written(groups: list[list[int]]) -> str:
    def ranks(group: list[int]) -> str:
        run = len(group) > 2 and group == list(range(group[0], group[-1] + 1))
        return f"{group[0]} to {group[-1]}" if run else " ".join(map(str, group))

    return "among ranks " + ("  |  ".join(map(ranks, groups)))


def _one(axis: Any, palette: Palette, found: Any, x: float) -> None:
    _titles(axis, palette, x, "Sharded", "fully_shard(model)")
    _strips(axis, palette, found["rows"], list(range(RANKS)), x, lambda _: (palette.accent, palette.on_accent))
    _bracket(axis, palette, x + SIDE + 0.08, TOP, TOP + STRIP)
    axis.text(x + SIDE + 0.28, TOP + STRIP / 2, "one weight,\n8 parts", va="center", fontsize=10, color=palette.muted)
    groups = found["groups"]
    assert groups["all_gather"] == groups["reduce_scatter"]
    _below(axis, palette, x, [("all-gather, reduce-scatter", _written(groups["all_gather"]))])


def _hybrid(axis: Any, palette: Palette, found: Any, x: float) -> None:
    _titles(axis, palette, x, "HSDP: replicate 2, shard 4", 'mesh=mesh["replicate", "shard"]')
    groups = found["groups"]
    assert groups["all_gather"] == groups["reduce_scatter"]
    gap = 0.55
    for copy, ranks in enumerate(groups["all_gather"]):
        left = x + copy * (SIDE + gap)
        _strips(axis, palette, found["rows"], ranks, left, lambda _: (palette.accent, palette.on_accent))
        axis.text(left + SIDE / 2, TOP - 0.08, f"copy {copy + 1}", ha="center", fontsize=9.5, color=palette.muted)
    for first, _ in groups["all_reduce"]:
        middle = TOP + STRIP * sum(found["rows"][str(first)]) / 2 / ROWS
        axis.annotate(
            "",
            xy=(x + SIDE + gap - 0.04, middle),
            xytext=(x + SIDE + 0.04, middle),
            arrowprops={"arrowstyle": "<|-|>", "color": palette.second, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
        )
    entries = [
        ("all-gather, reduce-scatter in a copy", _written(groups["all_gather"])),
        ("all-reduce of gradients between copies", _written(groups["all_reduce"])),
    ]
    _below(axis, palette, x, entries)


def _tensor(axis: Any, palette: Palette, found: Any, x: float) -> None:
    _titles(axis, palette, x, "2-D: shard 4, tensor parallel 2", 'parallelize_module(model, mesh["tp"], plan)')
    axis.text(
        x, 1.40, 'fully_shard(model, mesh=mesh["dp"])', fontsize=8, family="DejaVu Sans Mono", color=palette.muted
    )
    groups = found["groups"]
    assert groups["all_gather"] == groups["reduce_scatter"]
    first, second = groups["all_gather"]
    colors = {**dict.fromkeys(first, (palette.accent, palette.on_accent))}
    colors |= dict.fromkeys(second, (palette.tint, palette.text))
    _strips(axis, palette, found["rows"], list(range(RANKS)), x, colors.__getitem__)
    for index, ranks in enumerate((first, second)):
        rows = [row for rank in ranks for row in found["rows"][str(rank)]]
        top, bottom = TOP + STRIP * min(rows) / ROWS + 0.03, TOP + STRIP * max(rows) / ROWS - 0.03
        _bracket(axis, palette, x + SIDE + 0.08, top, bottom)
        text = f"half of tensor-\nparallel rank {index}"
        axis.text(x + SIDE + 0.28, (top + bottom) / 2, text, va="center", fontsize=10, color=palette.muted)
    entries = [
        ("all-gather, reduce-scatter in a half", _written(groups["all_gather"])),
        ("activations (tensor parallelism)", _written(groups["tensor parallel"])),
    ]
    _below(axis, palette, x, entries)
