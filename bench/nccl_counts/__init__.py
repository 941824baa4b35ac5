"""What a Llama block costs on NCCL, counted and not timed: fullshard and torch's FSDP2, by one and the same counter.

- ``driver.py``    the benchmark: configurations, the table, and where fullshard is worse
- ``worker.py``    one contestant in one configuration
- ``blocks.py``    Llama blocks in their true shapes, without the arithmetic
- ``group.py``     the process group: it calls itself NCCL, notes what it is asked for, and moves nothing
- ``recorder.py``  copies, other kernels and allocations, by operator
- ``kernels.py``   how many CUDA kernels a copy is
- ``host.py``      calls of functions in a step
"""
