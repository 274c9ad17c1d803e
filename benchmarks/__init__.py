"""What `vlcache bench` runs. Each measurement prints a table, writes JSON, and fails on empty or wrong output.

Figures that the docs quote are kept in `results/`, with date, chip and versions. Timings on shared machines are noisy:
both sides of a comparison run at one time, in turn, and medians count. `gpu` and `peer` are for a clone, and in no
wheel.
"""

# The allocator keeps its pages instead of returning them after each large array; both sides get that.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}

SCHEDULE = "schedule"
"""Stands for levels that fall from 0.08 to 0 over the layers, in the mean 0.025, as in `vlcache bench ttft`."""
POLICIES = ("exact", "full", "cacheblend-0.15", "mpic-32", SCHEDULE, "approximate")
"""All that `vlcache bench serve --policies all` compares with "off"."""
