"""Programs of static sizes, and the table of compiled programs.

A program is a frozen dataclass (`base`). Its fields are its sizes, and it is its own key. `memory` creates arrays that
programs update in place, loads cached KV and encodes new KV. `layers` computes a prefill, `window` decodes, `compress`
reduces the KV of a prompt, `encode` computes encoder rows from pixels, and `answer` computes tokens and scores from
hidden states. `table` compiles and runs programs, and `compile_cache` stores them on disk.
"""
