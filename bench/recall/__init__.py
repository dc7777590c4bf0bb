"""Whether a model finds facts that compaction removed."""
