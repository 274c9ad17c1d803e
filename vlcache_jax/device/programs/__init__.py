"""What the device runs: programs of static sizes, and the table of those that are compiled.

A program is a frozen dataclass (`base`): its fields are its sizes, and it is its own key. `state` makes what a program
may update in place, `layers` compute a prefill, `window` decodes, `compress` takes a prompt to what its answer goes on
with, `encode` takes pixels to encoder rows, `answer` rows to tokens and scores, `choose` chooses rows on the device,
`link` moves what is stored, `keep` what stays on the device. What they have in common is in `shapes`; `table` compiles
and runs them.
"""
