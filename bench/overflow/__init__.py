"""Compare overflow recognition with LiteLLM's on a catalogue of error responses."""
