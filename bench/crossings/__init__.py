"""Whether anybody waits for a summary: ``python -m bench.crossings``.

Conversations grow at a human pace, all of it a given number of times faster, towards an upstream that answers at once
and a summary model that takes its time. What is measured are the turns from which on another summary stands in the
prompt.
"""
