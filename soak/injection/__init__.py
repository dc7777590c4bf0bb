"""Check whether a real small model follows instructions in old tool results that it summarizes."""
