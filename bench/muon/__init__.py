"""Muon with owners beside Muon that gathers: ``driver.py`` asks the ranks of ``worker.py``, counts bytes of plans."""
