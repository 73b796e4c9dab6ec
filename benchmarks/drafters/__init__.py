"""Comparison of all drafters, published in docs/drafters.md."""
