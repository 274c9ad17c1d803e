"""Training of the small model that ships.

`conversations` puts images and questions into chat turns, `train` trains (torch), `transfer` converts the model to
another architecture, `long` trains one for long prompts, whose answers `held_out` counts; `curve` draws, `agreement`
compares answers with transformers.
"""
