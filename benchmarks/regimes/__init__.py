"""When drafts pay, by rows and context (``python -m benchmarks.regimes``)."""
