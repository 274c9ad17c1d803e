"""Device memory and compiled programs. Input and output are arrays of static sizes.

`runner` holds weights, KV pools and decode slots, calls `programs`, and measures their time. `sampler` chooses tokens.
`buckets` defines the sizes, `kv_shape` the layout of KV, and `mesh` the placement on several devices. `memory_plan`
chooses sizes that fit in memory, and `checkpoint` opens and loads weights. The package is independent of requests.
"""
