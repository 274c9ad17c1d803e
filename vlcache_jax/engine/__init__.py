"""Execution of requests: from planned requests to output tokens.

The input is sequences, each with its prompt, its plan and its cache reservation; they end with their tokens
(`request`). `engine` has the thread that drives the device, and its passes. Each pass admits sequences, launches
prefill and a multi-step decode, and reads what the previous pass launched (`results`). `scheduler` decides which
sequence runs, and `readiness` whether its cached KV and pixels are there. `pages` manages the pages of the KV pool and
finds the KV of a prompt that they hold already. `prefilling` launches prompts, `batching` cuts them into chunks of
static sizes, and `uploads` loads cached KV into the pool.

`compaction` compresses the KV of prompts into pages of another pool (`compressed_pages`). `decode_slots` manages the
device state of each output, `grammars` finds the allowed tokens, and `completions` builds the text. `compile_ahead`
compiles in the background what repeated requests need. Nothing here knows how requests are identified and planned, or
any calls and progress bars.
"""
