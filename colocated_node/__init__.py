"""Prefill and decode in one rank."""
