"""Programs of static sizes, and the table of those that are compiled.

A program is a frozen dataclass (`base`): its fields are its sizes, and it is its own key. `memory` creates what
programs update in place, loads cached KV and encodes new KV. `layers` compute a prefill, `window` decodes, `compress`
reduces the KV of a prompt, `encode` computes encoder rows of pixels, and `answer` tokens and scores of hidden states.
`table` compiles and runs them, and `compile_cache` keeps them on disk.
"""
