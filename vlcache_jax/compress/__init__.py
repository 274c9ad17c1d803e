"""KV compression: selection of the prompt tokens whose KV is kept for decoding after prefill.

A policy (`policies`) sets the number of observed tokens at the end of the prompt, the number of tokens that each layer
keeps, and the ranking of keys. `budgets` computes the tokens per layer on the host from the sparsity of attention.
`scores` ranks keys by the attention they received (traced). `parse` reads the argument `compress`. This package does
not depend on KV blocks, programs or other requests: the result depends only on the request's own prompt.
"""
