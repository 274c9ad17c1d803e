"""Routing: which of several engines gets a request. It imports nothing that imports jax."""
