"""Compare all drafters; benchmarks/results/drafters.md has the results."""
