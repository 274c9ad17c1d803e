"""A small Qwen3-VL that answers: pictures of coloured glyphs, questions about them, training, evaluation splits.

`pictures` draws, `tasks` asks, `conversations` puts both into chat turns, `train` trains (torch), `splits` writes the
evaluation files. See README.md beside this file.
"""
