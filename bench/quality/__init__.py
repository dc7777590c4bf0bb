"""What prompts keep: the engine's, LangChain's, and those with the newest messages only."""
