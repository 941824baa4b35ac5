"""What ``fullshard.plan`` predicts, beside what runs do.

- ``cases.py``   the configurations, built the same way for a run and for a plan
- ``worker.py``  a rank that runs them, with every allocation recorded
- ``driver.py``  the benchmark
"""
