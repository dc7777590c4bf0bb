"""Measure the names that a prompt still has for the next calls of an agent."""
