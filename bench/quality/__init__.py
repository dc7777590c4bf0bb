"""The quality benchmark: the proxy's engine and LangChain's on the same conversations.

``python -m bench.quality`` prints the table. ``judge`` defines the figures. The benchmark calls no model. LangChain
runs in its own environment (``requirements.lock``).
"""
