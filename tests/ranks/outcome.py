"""What became of a body on one rank, and the error that shows the outcomes of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# What a rank says when another one broke the collective. Such an outcome is shown after its likely causes.
CONSEQUENCES = (
    *("connection closed", "connection reset", "connection refused", "connection was closed"),
    *("timed out", "timeout", "broken pipe", "remote process exited"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a body on one rank.

    Attributes:
        rank: the rank it ran on.
        kind: ``returned`` (see ``value``), ``raised`` (see ``error_types``, ``message``, ``traceback``),
            ``skipped`` (by ``pytest.skip``), ``died`` (the process ended, see ``exit_code``) or ``hung`` (see
            ``stacks``).
        when: ``time.monotonic()`` at which it was known, comparable over the ranks of one machine.
        value: what the body returned.
        error_types: class names of the exception, most derived first, so that
            ``"ValueError" in outcome.error_types`` answers what ``isinstance`` would.
        exit_code: as ``subprocess`` has it, negative for a signal.
        stacks: the Python stacks of all threads of a rank that hung, innermost call first.
        output: what the rank wrote to stdout and stderr meanwhile (the end of it).
    """

    rank: int
    kind: Literal["returned", "raised", "skipped", "died", "hung"]
    when: float = 0.0
    value: Any = None
    error_types: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    stacks: str = ""
    output: str = ""

    @property
    def error_type(self) -> str:
        """Class name of the exception, empty where none was raised."""
        return self.error_types[0] if self.error_types else ""

    @property
    def failed(self) -> bool:
        """Whether the body did anything but return."""
        return self.kind != "returned"

    @property
    def is_consequence(self) -> bool:
        """Whether this looks like the echo of another rank's failure: a broken connection or a timeout."""
        text = self.message.lower()
        return self.kind == "raised" and any(words in text for words in CONSEQUENCES)

    @property
    def headline(self) -> str:
        """What happened, without the rank."""
        if self.kind == "raised":
            return f"raised {self.error_type}"
        if self.kind == "died":
            return f"died with exit code {self.exit_code}"
        if self.kind == "hung":
            return f"hung: {self.message}"
        return self.kind if not self.message else f"{self.kind}: {self.message}"


class RanksFailed(AssertionError):  # noqa: N818 - reads as what happened, in a test report
    """A body did not return on every rank; the message shows each failing rank, likely causes first."""

    def __init__(self, what: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__(describe(what, outcomes))


def describe(what: str, outcomes: list[Outcome]) -> str:
    """All failures as text: causes by time, then ranks that hung, then consequences; equal reports once."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    failures.sort(key=lambda each: (each.is_consequence, each.kind == "hung", each.when, each.rank))
    reports: dict[str, list[int]] = {}
    for failure in failures:
        echo = failure.is_consequence and not failures[0].is_consequence
        report = _report(failure, " (most likely a consequence of the above)" if echo else "")
        reports.setdefault(report, []).append(failure.rank)
    lines = [f"{what}: {len(failures)} of {len(outcomes)} ranks failed"]
    for report, ranks in reports.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}, each"
        lines.append(f"\n--- {who} {report}")
    return "\n".join(lines)


def _report(outcome: Outcome, remark: str) -> str:
    parts = [f"{outcome.headline}{remark} ---"]
    parts += [text.rstrip() for text in (outcome.traceback, outcome.stacks) if text]
    if outcome.output:
        parts += ["--- its output ---", outcome.output.rstrip()]
    return "\n".join(parts)
