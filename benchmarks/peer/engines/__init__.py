"""The engines of `benchmarks.peer`: one file each, which runs in an environment of its own.

A file here imports nothing of this package where it is imported, and nothing of its engine before that is opened. What
it holds:

- `setup(folder)`, called in this environment: makes the engine's own below the folder, unless it is there, and returns
  its Python and what is to stand in `os.environ`. It raises RuntimeError, in one sentence, where that cannot be done.
- `PACKAGES`, whose versions are told, and `REUSE`, the settings of `reuse` that it has; others' steps are left out.
- `ENGINE`, the class. `harness.py` calls it as `ENGINE(model, dtype, options)` in that Python, with the options
  of a `jobs.Scale`. Its methods are `warm(reuse)` (of settings that will be asked for), `answer(requests, reuse,
  logprobs)`, `settle()` (waits for work in the background), `forget()` (all prompts and images) and `close()`.

A request has `prompt`, with the model's markers of images, `images`, which are PIL images, and `max_tokens`, which is
also the least. An answer has `tokens`, `prompt_tokens` (how many), `cached` (how many of these, or None), `matches`
(how each image was found, or None) and `logprobs` (of each token a dict of the most likely ones by id; [] if not
asked for). Another peer is another such file, and `--peers` names it.
"""
