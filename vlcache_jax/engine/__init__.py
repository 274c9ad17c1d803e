"""Runs requests: from planned requests to output tokens.

Sequences come in, each with its prompt, its plan and its place in the cache, and end with their tokens (`request`).
`engine` has the thread that drives the device, and its passes: each admits sequences, launches prefill and a multi-step
decode, and reads what the pass before launched (`results`). `scheduler` decides which sequence runs, `pages` in which
pages of the KV pool, and which KV of a prompt is there already. `prefilling` launches prompts, which `batching` cuts
into chunks of static sizes, and `uploads` bring cached KV into the pool.

`compaction` compresses the KV of prompts into pages of another pool (`compressed_pages`). `decode_slots` have what the
device keeps of each output, `grammars` which tokens may come next, `completions` the text. `compile_ahead` compiles in
the background what repeated requests need. Nothing here knows how requests are identified and planned, nor calls and
progress bars.
"""
