"""What one real GPU can show about fullshard beside FSDP2: ``python -m bench gpu``.

- ``driver.py``    the command: the parts one after another, the JSON, and the blocks of ``docs/performance/gpu.md``
- ``parts.py``     what there is to run; each part is a process of its own under a time limit
- ``device.py``    an accelerator of any type for the parts: CUDA, or the emulated one for a rehearsal
- ``models.py``    what the parts train, and by whom
- ``step.py``      step time and memory, beside FSDP2
- ``host.py``      host time per unit, beside FSDP2
- ``overlap.py``   how much of a modelled network's time hides behind computation, by the profiler's trace
"""
