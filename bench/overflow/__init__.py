"""What is recognised of a catalogue of error answers, beside LiteLLM's own recognition."""
