"""Compute the price of conversations and their summaries at a provider with a prompt cache."""
