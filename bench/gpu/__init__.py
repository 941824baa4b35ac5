"""Everything that a real GPU can show about fullshard, in one command and ten minutes: ``python -m bench gpu``.

- ``driver.py``    the command: the parts one after another, the JSON, and the blocks of ``docs/performance/gpu.md``
- ``parts.py``     what there is to run; each part is a process of its own under a time limit
- ``device.py``    an accelerator of any type for the parts: CUDA, or the emulated one for a rehearsal
- ``models.py``    what the parts train, and by whom
- ``suite.py``     the tests on the device
- ``step.py``      step time and memory, beside FSDP2
- ``host.py``      host time per unit, beside FSDP2
- ``overlap.py``   how much of a modelled network's time hides behind computation, by the profiler's trace
- ``graphs.py``    capture and replay of a step
- ``races.py``     steps with streams held up, bit by bit against steps without
"""
