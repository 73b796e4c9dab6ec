"""Trains the small DeepSeek-V3 checkpoint that ships with the project."""
