"""Shared by benchmarks and tests: engines driven by hand, systems as processes, checkpoints."""
