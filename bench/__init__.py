"""The benchmark: the proxy beside a minimal pass-through, measured in one run on the same core.

``python -m bench`` prints the table. What a figure means is said in ``cases``; which figure is asked for in ``rows``.
"""
