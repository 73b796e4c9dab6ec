"""Layer 0: the network in PyTorch, its drafters, sampling and acceptance."""
