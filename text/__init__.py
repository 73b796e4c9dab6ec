"""Text to tokens and back, without torch."""
