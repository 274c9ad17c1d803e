"""Serves Qwen vision-language models in JAX and never computes the same image twice."""
