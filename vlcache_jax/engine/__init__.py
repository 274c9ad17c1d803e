"""What runs requests: from planned requests to chosen tokens.

Sequences come in, each with its prompt, its plan and its place in the cache; with their tokens they go out. `loop` is
the thread that drives the device, pass by pass: in each, `engine` admits, launches a prefill step and a window, and
reads what the pass before launched. `scheduler` says who runs, and `pages` in which pages of the KV pool, and what of
a prompt is there already; `readiness` whether what a prompt counts on is there; `prefilling` launches prompts, which
`batching` cuts into steps of static sizes: `uploads` bring stored K, V into the pool, group of layers by group of
layers, and a `passage` takes a step through the layers that have theirs; `device_copies` are those of records that
stay on the device; `results` reads tokens and scores.

`request` has what a request is on its way, `lanes` what the device keeps of each answer, and
`detokenizer` makes its text. `ahead` compiles in the background what a repeat will call for. Nothing here knows how
requests are identified and planned, of calls, progress bars or what users are told.
"""
