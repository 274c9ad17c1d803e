"""Routing of requests to several engines. The package does not import JAX, directly or indirectly."""
