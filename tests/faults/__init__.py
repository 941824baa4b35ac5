"""Faults that are put into the source, one at a time, to see whether the tests notice them.

``python -m tests.faults`` runs all, ``python -m tests.faults engine wrapper`` those of some rooms. Not part of the
suite: each fault needs the tests of its room. Run it before and after a change of many tests.
"""
