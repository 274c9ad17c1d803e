"""A small Qwen3-VL that answers: pictures of coloured glyphs, questions about them, evaluation splits.

`pictures` draws, `tasks` asks, `splits` writes the evaluation files. `research/tiny_vqa` trains the model.
"""
