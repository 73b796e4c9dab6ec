"""What Tandem does on one GPU: exactness, kernels, steps beside their floors, hand-over."""
