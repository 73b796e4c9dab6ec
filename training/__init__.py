"""Training of the tiny DeepSeek-V3 checkpoint that ships with the project, and of its drafters."""
