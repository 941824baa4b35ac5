"""A trace: what happened in which order, as text, and how two of them differ."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """One line of a trace."""

    kind: str
    text: str
    over: str = ""  # of a collective: its ranks

    def __str__(self) -> str:
        return f"  {self.kind:<14} {self.text}{self.over and f' over {self.over}'}"


class _Memory(NamedTuple):
    kind: str
    buffer: object  # kept until the step ends: what it is for may not be known before
    nbytes: int


class Trace:
    """Collects the events of steps. What happens before the first step is left out."""

    def __init__(self) -> None:
        self.steps: list[list[Event | _Memory]] = []

    def begin_step(self) -> None:
        self.steps.append([])

    def end_step(self, labels: dict[int, str]) -> None:
        """Say what buffers were for, by the ids of these; those that no unit keeps are copies."""
        events = self.steps[-1]
        for index, event in enumerate(events):
            if isinstance(event, _Memory):
                what = labels.get(id(event.buffer), "copy")
                events[index] = Event(event.kind, f"{what} {event.nbytes} B")

    def section(self, title: str) -> None:
        self.event("==", title)

    def event(self, kind: str, text: str) -> None:
        if self.steps:
            self.steps[-1].append(Event(kind, text))

    def memory(self, kind: str, buffer: object, nbytes: int) -> None:
        if self.steps:
            self.steps[-1].append(_Memory(kind, buffer, nbytes))

    def collective(self, kind: str, parts: Sequence[str], ranks: Sequence[int]) -> None:
        """One launch. Equal parts that follow each other are written once."""
        if self.steps:
            groups = [(part, len(list(same))) for part, same in itertools.groupby(parts)]
            text = ", ".join(part if count == 1 else f"{part} x{count}" for part, count in groups)
            self.steps[-1].append(Event(kind, text, _written(ranks)))

    def append(self, text: str) -> None:
        """What models mark themselves: "backward NAME"."""
        self.event(*text.split(" ", 1))

    def collectives(self) -> list[str]:
        """What was launched, without the ranks it went over: equal on all ranks."""
        events = [event for step in self.steps for event in step if isinstance(event, Event)]
        return [f"{event.kind} {event.text}" for event in events if event.over]

    def text(self) -> str:
        """All steps; one that repeats another is a single line."""
        lines: list[str] = []
        known: dict[str, int] = {}
        for number, step in enumerate(self.steps, start=1):
            own = [f"{e.text}:" if e.kind == "==" else str(e) for e in step if isinstance(e, Event)]
            first = known.setdefault("\n".join(own), number)
            lines += [f"# step {number}", *own] if first == number else [f"# step {number} as step {first}"]
        return "\n".join(lines) + "\n"


def _written(ranks: Sequence[int]) -> str:
    """``0-3`` for ranks without gaps, else ``0,2``."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def difference(expected: str, found: str, name: str) -> str:
    """A unified diff, whose hunks say in which step and part of it they begin; empty if there is none."""
    old, new = expected.splitlines(), found.splitlines()
    lines = difflib.unified_diff(old, new, f"{name} (stored)", f"{name} (now)", lineterm="")
    return "\n".join(_with_place(line, old) for line in lines)


def _with_place(line: str, old: Sequence[str]) -> str:
    header = re.match(r"@@ -(\d+)", line)
    if header is None:
        return line
    before = old[: int(header[1]) + 3]  # with the lines of context
    step = next((each for each in reversed(before) if each.startswith("# ")), "")
    section = next((each for each in reversed(before) if each.endswith(":")), "")
    return f"{line} {step.removeprefix('# ')}, {section.removesuffix(':')}"
