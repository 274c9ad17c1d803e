"""A small Qwen3-VL that answers questions: images of colored glyphs, questions about them, evaluation splits.

`pictures` draws images, `tasks` makes questions, `splits` writes the evaluation files. `research/tiny_vqa` trains the
model.
"""
