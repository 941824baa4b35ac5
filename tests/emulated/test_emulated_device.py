"""The emulated accelerator as torch sees it: memory, streams, generators, copies, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerator_tools import on_emulated, settled
from torch import nn

from ranks import Rank


def allocated() -> int:
    return torch.accelerator.memory_allocated()


@on_emulated(1)
def test_rounding_and_statistics(rank: Rank) -> None:
    """Blocks are multiples of 512 bytes; allocated, peak and reserved bytes are counted; the cache can be emptied."""
    module = torch.get_device_module(rank.device)
    torch.accelerator.empty_cache()  # a cached block that is a little larger would be taken whole
    before = allocated()
    value = torch.empty(1, dtype=torch.uint8)
    assert allocated() - before == 512
    larger = torch.empty(513, dtype=torch.uint8)
    assert allocated() - before == 512 + 1024 == module.memory_allocated() - before
    module.reset_peak_memory_stats()
    del larger
    assert allocated() - before == 512
    assert torch.accelerator.max_memory_allocated() - before == 512 + 1024
    assert module.memory_reserved() >= allocated()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == allocated()
    del value
    assert allocated() == before


@on_emulated(1)
def test_blocks_are_reused_by_their_stream(rank: Rank) -> None:
    """A freed block goes to the next request of its own stream at once, poisoned, and to no other stream's."""
    settled()
    torch.accelerator.empty_cache()
    other = torch.Stream(rank.device)
    value = torch.ones(1000)
    address = value.data_ptr()
    del value
    with other:
        theirs = torch.empty(1000)
        assert theirs.data_ptr() != address
    again = torch.empty(1000)
    assert again.data_ptr() == address
    assert again.isnan().all()


# What is done with a tensor whose storage is freed, and one on the host.
FREED: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda value, on_cpu: value + 1,
    lambda value, on_cpu: value.cpu(),
    lambda value, on_cpu: value.zero_(),
    lambda value, on_cpu: value.copy_(on_cpu),
    lambda value, on_cpu: on_cpu.copy_(value),
    lambda value, on_cpu: nn.functional.linear(torch.ones(4, 4), value),
]


@on_emulated(1)
def test_storages_can_be_freed_and_filled_again(rank: Rank) -> None:
    """Touching a tensor whose storage was freed is an error, not garbage; after it is sized again it can be written."""
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    for touch in FREED:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            touch(value, torch.ones(4, device="cpu"))
    value.untyped_storage().resize_(16)
    value.fill_(2)
    value.untyped_storage().resize_(32)  # keeps what was there
    assert value.tolist() == [2.0] * 4


@on_emulated(1)
def test_streams(rank: Rank) -> None:
    """The current stream is one per thread and device; a stream is a context, and knows its device."""
    default, other = torch.accelerator.current_stream(), torch.Stream(rank.device)
    assert other.device == rank.device and other != default and other.query()
    seen = []
    with other:
        assert torch.accelerator.current_stream() == torch.emulated.current_stream() == other
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
    assert seen == [default] and torch.accelerator.current_stream() == default


@on_emulated(1)
def test_backward_runs_on_the_streams_of_forward(rank: Rank) -> None:
    """Backward's thread runs each operation on the stream of its forward, and orders the streams."""
    value, other = torch.ones(4, requires_grad=True), torch.Stream(rank.device)
    streams = []
    doubled = value * 2
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        tripled = doubled * 3
        tripled.register_hook(lambda grad: streams.append(torch.accelerator.current_stream()))
    torch.accelerator.current_stream().wait_stream(other)
    tripled.sum().backward()
    assert streams == [other]
    assert value.grad.tolist() == [6.0] * 4


@on_emulated(1)
def test_devices_by_index(rank: Rank) -> None:
    """Operations run on the device of their tensors, not on the current one; tensors of two devices do not mix."""
    assert torch.accelerator.device_count() == torch.get_device_module("emulated").device_count() == 4
    first, second = torch.ones(4, device="emulated:0"), torch.ones(4, device="emulated:1")
    assert torch.accelerator.current_device_index() == 0
    assert (second * 2).sum().device == torch.device("emulated", 1)
    assert torch.zeros_like(second).device.index == 1
    assert nn.functional.dropout(second).device.index == 1
    with torch.accelerator.device_index(1):
        assert torch.ones(2, device="emulated").device.index == 1
        assert (first * 2).device.index == 0
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([first, second])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="emulated:7")
    first.mul_(3)
    assert first.to("emulated:1").tolist() == second.mul(3).tolist()  # a copy is ordered with the streams of both


@on_emulated(1)
def test_devices_do_not_mix_with_the_host(rank: Rank) -> None:
    """Operations refuse tensors of the host beside those of the device; 0-D ones, and indices, are welcome."""
    ours, theirs = torch.ones(2, 2), torch.ones(2, 2, device="cpu")
    for mix in (
        lambda: theirs + ours,
        lambda: ours.add_(theirs),
        lambda: torch.cat([ours, theirs]),
        lambda: nn.functional.linear(ours, theirs),
        lambda: torch.where(ours > 0, ours, theirs),
        lambda: ours.index_select(0, torch.tensor([0], device="cpu")),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mix()
    assert (ours + torch.tensor(1.0, device="cpu")).sum().item() == 8
    assert ours[torch.tensor([0], device="cpu")].shape == (1, 2)
    with pytest.raises(TypeError, match="host memory"):
        ours.numpy()


@on_emulated(1)
def test_pinned_memory(rank: Rank) -> None:
    """Pinned memory is known as such by any view; freed, it is used again."""
    pinned = torch.empty(100, device="cpu", pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[3:].view(-1).is_pinned()
    assert torch.ones(3, device="cpu").pin_memory().is_pinned()
    assert not torch.ones(3, device="cpu").is_pinned()
    address = pinned.data_ptr()
    del pinned
    assert torch.empty(100, device="cpu", pin_memory=True).data_ptr() == address
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(3).pin_memory()


@on_emulated(1)
def test_generators(rank: Rank) -> None:
    """Each device has a generator of its own, which ``manual_seed`` seeds, and whose state can be kept and set."""
    module = torch.get_device_module("emulated")
    torch.manual_seed(3)
    first = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cpu"), first.cpu())  # the CPU's algorithm, from the same seed
    state = module.get_rng_state()
    drawn = torch.randn(5)
    torch.rand(7, device="cpu")
    module.set_rng_state(state)
    assert torch.equal(torch.randn(5), drawn)
    own, again = (torch.Generator(rank.device).manual_seed(9) for _ in range(2))
    assert torch.equal(torch.rand(3, generator=own), torch.rand(3, generator=again))
    with torch.random.fork_rng(device_type="emulated"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), inside)


@on_emulated(1)
def test_copies(rank: Rank) -> None:
    """Copies convert, cross devices and layouts; those to unpinned memory, and blocking ones, block the host."""
    from accelerator.races import count

    value = torch.arange(6.0).reshape(2, 3)
    pinned = torch.empty(2, 3, device="cpu", pin_memory=True)
    for blocks, make in [
        (1, lambda: value.cpu()),
        (1, lambda: value.to("cpu", non_blocking=False)),
        (1, lambda: pinned.copy_(value)),
        (0, lambda: pinned.copy_(value, non_blocking=True)),
        (0, lambda: value.to(torch.bfloat16)),
        (0, lambda: value.t().contiguous()),
        (0, lambda: value.copy_(pinned, non_blocking=True)),
        (1, lambda: value.copy_(pinned)),
        (1, lambda: torch.empty(2, 3, device="cpu").copy_(value, non_blocking=True)),
    ]:
        torch.accelerator.synchronize()
        with count() as counts:
            make()
        assert len(counts.host_syncs) == blocks
    torch.accelerator.synchronize()
    assert value.t().to(torch.int64).cpu().tolist() == [[0, 3], [1, 4], [2, 5]]
    host = torch.empty(3, 2, device="cpu")
    assert host.copy_(value.t()).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.empty(2, 3).copy_(host.t().double()).tolist() == value.tolist()


@on_emulated(1)
def test_threads_do_not_block_each_other(rank: Rank) -> None:
    """Threads that allocate, free, launch and synchronize at once neither deadlock nor race."""

    def work(stream: torch.Stream) -> None:
        with stream:
            value = torch.ones(256, device=rank.device, requires_grad=True)
            for _ in range(30):
                (value * 2).sum().backward()
                stream.synchronize()
            assert value.grad.sum().item() == 256 * 60

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, [torch.Stream(rank.device) for _ in range(4)]))
