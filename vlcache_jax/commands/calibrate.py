"""`vlcache calibrate`: rates of loading and computing images on this machine."""

from __future__ import annotations

from vlcache_jax.common.files import check_writable
from vlcache_jax.preparation import planner
from vlcache_jax.study.calibration import calibrate
from vlcache_jax.study.report import show

_LOADS = {"kv": "load its KV", "encoder": "load its encoder output, compute", "none": "compute it from its pixels"}


def run(model: str, dtype: str, codec: str, tensor_parallel_size: int = 1) -> None:
    """Measure the rates, print them, and write them to the folder where engines read them.

    Raises:
      ValueError: see `calibrate`, or the folder is not writable.
    """
    check_writable("rates", planner.folder() / "new")
    found = calibrate(model, dtype=dtype, codec=codec, tensor_parallel_size=tensor_parallel_size)
    rates, image = found.rates, found.image
    units = {
        "link a token": rates.link,
        "compute a token": rates.row,
        "encode a patch": rates.encode,
        "decode and preprocess a patch": rates.decode,
        "load 1 MB of encoder output": 1e6 * rates.stage,
        **{f"load 1 MB of KV from the {tier}": 1e6 * rate for tier, rate in rates.transfer.items()},
    }
    show("Time of each unit", [{"what": name, "microseconds": 1e6 * seconds} for name, seconds in units.items()])
    costs = rates.costs(image)
    rows = [{"what": words, "ms": 1e3 * costs[load]} for load, words in _LOADS.items() if load in costs]
    show(f"A cached image of {image.tokens} tokens", rows)
    ratio = 1 - costs["kv"] / costs["encoder"]
    advice = f"pays if less than {100 * ratio:.0f} % of its tokens are recomputed" if ratio > 0 else "does not pay"
    print(f"\nloading the KV {advice}")
    print(f"written to {rates.save(found.identity)}")
