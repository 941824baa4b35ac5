"""Who ends a run, and who does not, by reports of ranks in several process groups."""

from __future__ import annotations

from fullshard.progress import Launch
from fullshard.ranks.verdict import GroupReport, Report, judge


def group(ranks: list[int], launches: int) -> GroupReport[Launch]:
    return GroupReport(ranks, 0, [Launch("all_gather", ("a",), 0, 0)] * launches)


def test_a_process_that_nobody_waits_for_ends_no_run() -> None:
    """One of a replica that is through is gone; a rank of another replica waits for its neighbor, which is slow."""
    waits = Report(
        "waits", "", waits_for=("shards", 1), groups={"shards": group([0, 1], 2), "copies": group([0, 2], 1)}
    )
    slow = Report("runs", "", groups={"shards": group([0, 1], 1)})
    verdict = judge({0: waits, 1: slow}, {2: "its process is gone"})
    assert verdict is not None and (verdict.kind, verdict.culprits) == ("slow", [1])


def test_a_rank_that_has_ended_after_its_last_launch_ends_no_run() -> None:
    """Others still receive what it has sent, and wait for a third, which is slow."""
    waits = Report("waits", "", waits_for=("all", 1), groups={"all": group([0, 1, 2], 2)})
    ended = Report("exited", "", groups={"all": group([0, 1, 2], 2)})
    slow = Report("runs", "", groups={"all": group([0, 1, 2], 1)})
    verdict = judge({0: waits, 1: ended, 2: slow}, {})
    assert verdict is not None and (verdict.kind, verdict.culprits) == ("slow", [2])
