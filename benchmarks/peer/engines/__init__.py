"""The engines of `benchmarks.peer`: one file each, which runs in its own environment.

Importing such a file imports nothing of this package, and nothing of its engine before the engine is opened. It has:

- `setup(folder)`, called in this environment: creates the engine's own environment in the folder, unless it exists, and
  returns its Python and the variables for `os.environ`. It raises RuntimeError, with one sentence, if that fails.
- `PACKAGES`, whose versions are reported, and `REUSE`, its supported settings of `reuse`; steps of others are left out.
- `ENGINE`, the class. `harness.py` calls it as `ENGINE(model, dtype, options)` in that Python, with the options
  of a `jobs.Scale`. Its methods are `warm(reuse)` (with settings of later requests), `answer(requests, reuse,
  logprobs)`, `settle()` (waits for work in the background), `forget()` (all prompts and images) and `close()`.

A request has `prompt` (with the model's markers of images), `images` (PIL images), and `max_tokens`, which is also the
minimum. An answer has `tokens`, `prompt_tokens` (count), `cached` (how many prompt tokens were cached, or None),
`matches` (how each image was found, or None) and `logprobs` (for each token a dict of the most likely ones by id; [] if
not requested). To add another peer, add such a file and name it in `--peers`.
"""
