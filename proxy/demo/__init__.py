"""The demo: a long agent session with and without the proxy, against a stand-in for OpenAI.

The tests use the stand-in through ``tests/kit/upstream.py``.
"""
