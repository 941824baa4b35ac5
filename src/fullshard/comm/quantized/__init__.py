"""Quantized communication: large parameters and gradients in 8 bits per value.

- ``mesh.py``       the choice for both axes of a mesh, and the bytes received
- ``transport.py``  the transport that quantizes
- ``blocks.py``     blocks of values that share a scale
"""
