"""Layer 1: parts that all ranks have in common: engine thread, frames, actor shell."""
