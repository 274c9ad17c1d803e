"""What the device holds and what it is told to do: from arrays of static sizes to arrays.

`runner` holds weights, KV pool and lanes and calls `programs`. Rows of a step travel `packed`; `sampler` chooses
tokens; `clock` tells how long it took. `ladder` has the sizes, `memory_plan` what fits, `checkpoint` the weights.
Nothing here knows of requests.
"""
