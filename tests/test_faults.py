"""The faults of ``python -m tests.faults`` apply to the source as it is now."""

from __future__ import annotations

import importlib

from tests.faults.__main__ import ROOMS

from source_files import PACKAGE


def test_every_fault_changes_a_text_that_occurs_once() -> None:
    faults = [fault for room in ROOMS for fault in importlib.import_module(f"tests.faults.{room}").FAULTS]
    assert len(faults) > 80
    found = {(fault.file, fault.old): (PACKAGE / fault.file).read_text().count(fault.old) for fault in faults}
    assert {fault: times for fault, times in found.items() if times != 1} == {}
