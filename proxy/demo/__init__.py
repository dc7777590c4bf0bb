"""The demo: a long agent session with and without the proxy, against a stand-in for OpenAI.

The tests also use the stand-in (``upstream``).
"""
