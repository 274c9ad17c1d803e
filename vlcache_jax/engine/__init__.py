"""What runs requests: from identified images to chosen tokens.

A call's prompts come in, each with its policy; sequences with their tokens go out. `identification` finds out which
images the prompts show, `recognition` those of one picture or video, of which `media` knows the head; `linker` which
of them are known, and gives what will be computed its place in the cache; `serving` takes a call's requests through
all this, window by window. `loop` is the thread that drives the device, pass by pass: in each, `engine` admits,
launches a prefill step and a window, and reads what the pass before launched. `scheduler` says who runs, and `pages`
in which pages of the KV pool, and what of a prompt is there already; `readiness` whether what a prompt counts on is
there; `prefilling` launches prompts, which `batching` cuts into steps of static sizes: `linking` brings stored K, V
into the pool, group of layers by group of layers, and a `passage` takes a step through the layers that have theirs;
`results` reads tokens and scores, `clock` tells how long they took.

`runner` holds weights, KV pool and lanes and calls compiled `programs`, each of them defined in `definitions`, of
which `window` decodes. How a token is chosen: `sampling` has the user's parameters, `sampler` the device's part,
`opening` and `lanes` what the device keeps of each answer, `detokenizer` its text. `ahead` compiles in the background
what a repeat will call for. `ladder` has the sizes, `memory_plan` what fits, `checkpoint` the weights, `request` what
a request is on its way, `sequences` how it becomes what runs, `verification` the same once more without the cache.
Nothing here knows of calls, progress bars or what users are told.
"""
