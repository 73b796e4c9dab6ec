"""Layer 1: what every rank has, whatever it computes: engine thread, frames, actor shell."""
