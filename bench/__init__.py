"""The benchmark: the proxy compared with a minimal pass-through, in one run on the same core.

``python -m bench`` prints the table. ``cases`` has most of the figures and their targets.
"""
