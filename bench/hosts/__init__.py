"""Training on several hosts with a slow link between them: network namespaces of one machine.

- ``network.py``  the namespaces and their links
- ``driver.py``   contestants, turns, and the page
"""
