"""Tandem on one GPU: exactness, kernels, steps compared with their floors, and hand-over."""
