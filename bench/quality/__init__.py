"""Compare the prompts of the engine, of LangChain, and of the newest messages alone."""
