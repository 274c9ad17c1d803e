"""How the small model that ships was trained.

`conversations` puts pictures and questions into chat turns, `train` trains (torch), `transfer` makes a model of another
architecture of it, `long` one of long prompts, whose answers `held_out` counts; `curve` draws, `agreement` compares
answers with transformers.
"""
