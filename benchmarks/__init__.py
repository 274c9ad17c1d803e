"""Measurements. Each prints a table, writes JSON, and fails on empty or wrong output.

Run one with `uv run --group test python -m vlcache_jax.benchmarks.prefill`. Figures that the README quotes are kept in
`results/`, with date, chip and versions. Timings on shared machines are noisy: both sides of a comparison run at
one time, in turn, and medians count.
"""
