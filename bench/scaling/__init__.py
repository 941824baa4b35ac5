"""Costs of one rank by units and ranks: ``driver.py`` starts ``worker.py`` or ``checkpoint.py`` per figure."""
