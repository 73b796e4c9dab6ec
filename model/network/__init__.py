"""The DeepSeek-family network in PyTorch."""
