"""What runs requests: from identified images to chosen tokens.

A call's prompts come in, each with its policy; sequences with their tokens go out. `identification` finds out which
images a prompt shows, `linker` which of them are known, and gives what will be computed its place in the cache;
`serving` takes a call's requests through all this, window by window; `scheduler` says which sequences run together,
and `pages` in which pages of the KV pool, and what of a prompt is there already; `batching` cuts prompts into steps
of static sizes, `decoding` says what answers need for their next token; `engine` runs them; `runner` holds weights
and KV pool and calls compiled `programs`, each of them defined in `definitions`; `ahead` compiles in the background
what a repeat will call for. `ladder` has the sizes, `memory_plan` what fits, `checkpoint` the weights, `request` what
a request is on its way, `sequences` how it becomes what runs, `verification` the same once more without the cache.
Nothing here knows of calls, threads of callers, progress bars or what users are told.
"""
