"""Benchmarks of fullshard beside its peers, interleaved within a measurement, such as ``python -m bench.step``."""
