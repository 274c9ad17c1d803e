"""Device memory and programs: from arrays of static sizes to arrays.

`runner` holds weights, KV pools and decode slots, calls `programs`, and measures their time; `sampler` chooses tokens.
`buckets` has the sizes, `kv_shape` the form of the pool, `mesh` the placement on several devices, `memory_plan` what
fits, `checkpoint` the weights. Nothing here knows requests.
"""
