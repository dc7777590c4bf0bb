"""The benchmark of quality: the engine beside LangChain's on the same conversations.

``python -m bench.quality`` prints the table. What a figure means is said in ``judge``; nothing is asked of any model.
LangChain runs in an environment of its own (``requirements.lock``), the rest in the project's.
"""
