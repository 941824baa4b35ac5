"""Stock optimizers that step plain local tensors in place of DTensors.

- ``localize.py``  which optimizers do, and the hooks around their steps
- ``step.py``  one step
"""
