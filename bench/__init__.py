"""Benchmarks of fullshard beside its peers, each in one interleaved run, such as ``python -m bench.step``."""
