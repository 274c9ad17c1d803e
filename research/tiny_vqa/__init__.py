"""How the small model that ships was trained.

`conversations` puts pictures and questions into chat turns, `train` trains (torch), `transfer` makes a model of another
architecture of it, `curve` draws, `agreement` compares answers with transformers.
"""
