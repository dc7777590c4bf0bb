"""``python -m bench.crossings``: measure how long clients wait for summaries.

Conversations grow like those of people and agents, but faster. The upstream responds at once, and the summary model
takes several seconds. A crossing is a turn whose prompt has another summary than the turn before.
"""
