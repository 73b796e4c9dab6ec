"""The main model in PyTorch."""
