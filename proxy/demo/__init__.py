"""The demonstration: an agent's long session with and without the proxy, in front of a stand-in for OpenAI.

The stand-in (``upstream``) is also what the tests put behind the proxy.
"""
