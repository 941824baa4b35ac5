"""What ``fullshard.plan`` predicts, beside what runs do.

- ``cases.py``       the configurations, built the same way for a run and for a plan
- ``worker.py``      a rank that runs them, with every allocation recorded
- ``modelled.py``    steps on modelled networks, run and planned
- ``driver.py``      the benchmark
"""
