"""The race checker: each kind of conflict is found, and each way to order two accesses silences it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from accelerator_tools import expect_races, on_emulated, settled

from pairwise import each_value
from ranks import Rank

Access = Callable[[torch.Tensor], object]
ACCESSES: dict[str, Access] = {"read": lambda value: value + 0, "write": lambda value: value.fill_(1)}


@on_emulated(1)
def test_unordered_accesses(rank: Rank) -> None:
    """Two streams that touch the same bytes race, unless both only read; the report has the lines of both."""
    from accelerator.races import take_races

    for first, second in itertools.product(ACCESSES, ACCESSES):
        value, other = torch.ones(8), torch.Stream(rank.device)
        settled()
        ACCESSES[first](value)
        with other:
            kept = ACCESSES[second](value)
        found = [race for race in take_races() if race.kind != "reuse of freed memory"]
        assert {race.kind for race in found} == (set() if first == second == "read" else {f"{second} after {first}"})
        for race in found:
            assert race.nbytes == 32
            assert all("test_unordered_accesses" in access.stack for access in (race.first, race.second))
            assert race.first.where != race.second.where
            assert str(race).count("aten::") == 2
        settled()
        del kept


def recorded(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def by_a_third_stream(before: torch.Stream, after: torch.Stream) -> None:
    third = torch.Stream(before.device)
    third.wait_stream(before)
    after.wait_stream(third)


def by_reading_a_value(before: torch.Stream, after: torch.Stream) -> None:
    with before:
        torch.zeros(1).item()


ORDERINGS: dict[str, Callable[[torch.Stream, torch.Stream], object]] = {
    "event": lambda before, after: recorded(before).wait(after),
    "wait_stream": lambda before, after: after.wait_stream(before),
    "third stream": by_a_third_stream,
    "stream on the host": lambda before, after: before.synchronize(),
    "event on the host": lambda before, after: recorded(before).synchronize(),
    "device": lambda before, after: torch.accelerator.synchronize(),
    "reading a value": by_reading_a_value,
}


@on_emulated(1)
@each_value(order=ORDERINGS, first=ACCESSES)
def test_orderings(rank: Rank, order: str, first: str) -> None:
    """Events, streams that wait, and the host that waits order what came before; what comes later still races."""
    value, before, after = torch.ones(8), torch.Stream(rank.device), torch.Stream(rank.device)
    settled()
    with before:
        kept = ACCESSES[first](value)
    ORDERINGS[order](before, after)
    with after:
        value.fill_(2)
    with expect_races():
        pass
    with before, expect_races("write after write"):
        value.fill_(3)
    settled()
    del kept


@on_emulated(1)
def test_one_stream_is_in_order(rank: Rank) -> None:
    """Accesses on one stream never race, whatever thread they come from."""
    value, stream = torch.ones(8), torch.Stream(rank.device)
    settled()

    def write() -> None:
        with stream:
            value.add_(1)

    for _ in range(3):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    with stream, expect_races():
        value.mul_(2)
    settled()


@on_emulated(1)
def test_stale_event_orders_nothing_new(rank: Rank) -> None:
    """An event stands for what was there when it was recorded, and one that never was recorded for nothing."""
    value, other = torch.ones(8), torch.Stream(rank.device)
    settled()
    event = torch.Event(rank.device)
    event.record()
    value.fill_(1)
    event.wait(other)
    torch.Event(rank.device).wait(other)
    with other, expect_races("write after write"):
        value.fill_(2)
    event.record()
    event.wait(other)
    with other, expect_races():
        value.fill_(2)
    settled()


@on_emulated(1)
def test_bytes_count_and_not_tensors(rank: Rank) -> None:
    """Interleaved columns of one tensor on two streams do not race; a row across them does."""
    table, other = torch.ones(8, 8), torch.Stream(rank.device)
    settled()
    with expect_races():
        table[:, ::2].fill_(1)
        with other:
            table[:, 1::2].fill_(2)
    with other, expect_races("write after write"):
        table[3, 2:4].fill_(3)
    settled()


@on_emulated(1)
def test_reuse_of_freed_memory(rank: Rank) -> None:
    """Memory that another stream still uses when it is freed races with the next allocation; recorded, it does not."""
    other = torch.Stream(rank.device)

    def use(record: bool) -> None:
        value = torch.ones(1 << 10)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            kept = value * 2
        if record:
            value.record_stream(other)
        del value
        torch.empty(1 << 10)
        settled()
        del kept

    with expect_races("reuse of freed memory"):
        use(record=False)
    with expect_races():
        use(record=True)


@on_emulated(1)
def test_host_and_pinned_memory(rank: Rank) -> None:
    """The host races with copies from and to pinned memory until it has waited for them."""
    pinned, value = torch.ones(16, device="cpu").pin_memory(), torch.zeros(16)
    settled()
    value.copy_(pinned, non_blocking=True)
    with expect_races():
        pinned.sum()
    with expect_races("write after read"):
        pinned.fill_(2)
    settled()
    pinned.copy_(value, non_blocking=True)
    with expect_races("read after write"):
        assert (pinned + 0).isnan().all()  # it has not arrived
    torch.accelerator.synchronize()
    with expect_races():
        assert pinned.sum().item() == 16
        pinned.fill_(2)
    value.copy_(pinned, non_blocking=True)
    assert value.sum().item() == 32
    pinned.copy_(value)  # blocks
    with expect_races():
        pinned.zero_()


@on_emulated(1)
def test_counts(rank: Rank) -> None:
    """Host synchronizations, new events and new streams of a period are counted, with their stacks."""
    from accelerator.races import count

    value, pinned = torch.ones(4), torch.ones(4, device="cpu").pin_memory()
    with count() as none:
        event_free = (value * 2).sum()
        value.copy_(pinned, non_blocking=True)
        pinned.copy_(value, non_blocking=True)
        torch.empty(7)
    assert (none.host_syncs, none.events_made, none.streams_made) == ([], [], [])
    with count() as some:
        event_free.item()
        value.cpu()
        value[value > 0]
        value[value > 0] = torch.ones(4)
        value[value > 0] = 1.0  # none: it fills
        value.nonzero()
        torch.equal(value, value)
        torch.ones(4, device="cpu").to(rank.device)
        torch.accelerator.synchronize()
        torch.Event(rank.device).record()
        torch.Stream(rank.device)
    assert len(some.host_syncs) == 8, [sync.what for sync in some.host_syncs]
    assert len(some.events_made) == len(some.streams_made) == 1
    assert all("test_counts" in access.stack for access in some.host_syncs)


def on(stream: torch.Stream, value: torch.Tensor) -> None:
    with stream:
        value.add_(1)


def beside(stream: torch.Stream, value: torch.Tensor) -> None:
    stream.wait_stream(torch.accelerator.current_stream())
    on(stream, value)


def joined(stream: torch.Stream, value: torch.Tensor) -> None:
    beside(stream, value)
    torch.accelerator.current_stream().wait_stream(stream)
    (value * 2).sum()


# What is done in a capture, with a stream, an event from before and memory, and what it says of that.
CAPTURED: dict[str, tuple[Callable[[torch.Stream, torch.Event, torch.Tensor], object], str]] = {
    "value": (lambda stream, event, value: value[0].item(), "host synchronization"),
    "synchronize": (lambda stream, event, value: torch.accelerator.synchronize(), "host synchronization"),
    "query": (lambda stream, event, value: recorded(torch.accelerator.current_stream()).query(), "query of an event"),
    "pin": (lambda stream, event, value: torch.ones(3, device="cpu").pin_memory(), "allocation of pinned memory"),
    "stream": (lambda stream, event, value: on(stream, value), "work on a stream that is not captured"),
    "old event": (lambda stream, event, value: event.wait(), "recorded outside of the capture"),
    "not joined": (lambda stream, event, value: beside(stream, value), "was not joined"),
    "fine": (lambda stream, event, value: joined(stream, value), ""),
}


@on_emulated(1)
def test_capture(rank: Rank) -> None:
    """A capture finds each thing that CUDA forbids during one, and nothing else."""
    from accelerator.races import capture

    for name, (body, error) in CAPTURED.items():
        value, other = torch.ones(8), torch.Stream(rank.device)
        event = recorded(torch.accelerator.current_stream())
        settled()
        with torch.Stream(rank.device), capture() as errors:
            body(other, event, value)
        found = [access.what for access in errors]
        assert all(error in what for what in found) and bool(found) == bool(error), (name, found)
        settled()
