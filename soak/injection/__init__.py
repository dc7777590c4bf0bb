"""Orders in old tool results, a real small model that reads and writes the summaries of them, and who obeys."""
