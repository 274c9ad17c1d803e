"""Conversion of Hugging Face checkpoints to a format that loads faster.

The command is `python -m vlcache_jax.convert SOURCE DESTINATION`, or `vlcache convert`.

A Hugging Face checkpoint is a few safetensors files with their own tensor names, and matrices stored [out, in].
`plan.py` reads their headers and finds the stored tensor of every parameter of the model, or reports all errors at
once. `stream.py` writes tensor by tensor with Orbax (`store.py`), under the model's names, matrices as [in, out], in
one dtype. It adds a manifest (`manifest.py`) and the tokenizer's files. The directory appears when it is complete
(`partial.py`). The engine opens both kinds of directory. A converted one needs no transposition at load, stores its
fingerprint, and can be verified against its hashes (`check_contents`).

The package depends on the models, and on no other part of the library.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlcache_jax.convert.progress import ConvertProgress as ConvertProgress
    from vlcache_jax.convert.stream import ConversionReport as ConversionReport
    from vlcache_jax.convert.stream import check_contents as check_contents
    from vlcache_jax.convert.stream import convert as convert
    from vlcache_jax.convert.stream import verify_weights as verify_weights

__all__ = ["ConversionReport", "ConvertProgress", "check_contents", "convert", "verify_weights"]


def __getattr__(name: str) -> Any:
    # Imported at first use, so that --help of a command does not wait for JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vlcache_jax.convert import stream

    return getattr(stream, name)
