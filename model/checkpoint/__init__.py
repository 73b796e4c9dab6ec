"""Reading checkpoints: config.json, safetensors files, and weights for the network."""
