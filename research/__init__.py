"""Measurements and training for developers of the project. They run from a clone and are in no wheel.

Each is a command, such as `uv run --group test python -m research.prefill`. Those that count or measure print a table
and write JSON, which docs quote from `benchmarks/results`; `published` writes the tables of the docs from these files.

`policies`, `budgets`, `mpic` and `analyze` are the studies of reuse and compression. They compare policies, compressed
prompts by method and budget, requests about many images, and errors inside a model. They accept any checkpoint.
"""
