"""Helpers for every package: checks of values, JSON and other files, progress bars, and vLLM's argument names."""
