"""The model on one rank: checkpoint, network, kernels, drafters, sampling and acceptance rules."""
