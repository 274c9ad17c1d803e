"""From a Hugging Face checkpoint to one that loads fast: `python -m vlcache_jax.convert SOURCE DESTINATION`.

A checkpoint of the hub is a few safetensors files under foreign names, with matrices stored [out, in]. `plan.py` reads
their headers and finds the stored tensor of every parameter of the model, or says all that is wrong at once.
`stream.py` takes one tensor after the other through memory into Orbax (`store.py`), under the model's own names,
matrices as [in, out], in one dtype, with a manifest (`manifest.py`) and the tokenizer's files beside them, in a
directory that appears when it is complete (`partial.py`). The engine opens both kinds of directory; a converted one
needs no transposing at load, knows its fingerprint, and can be compared with its hashes (`check_contents`).

This folder knows the models and nothing else of the library.
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
    # Imported at first use: a command's --help need not wait for JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vlcache_jax.convert import stream

    return getattr(stream, name)
