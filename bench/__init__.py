"""The benchmark: the proxy compared with a minimal pass-through, in one run on the same core.

``python -m bench`` prints the table. ``cases`` describes the figures and has their targets.
"""
