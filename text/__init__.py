"""Conversion of text to tokens and back. Nothing here imports torch."""
