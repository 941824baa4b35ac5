"""State of optimizers on one rank, by FQN and as regions of unsharded tensors; no communication but comparisons.

- ``state.py``    what an optimizer holds, and whether all ranks hold the same
- ``target.py``   loading: saved state matched with an optimizer, filled, installed
- ``initial.py``  state before the first step, as a target for loading
"""
