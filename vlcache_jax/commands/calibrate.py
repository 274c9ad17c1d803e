"""`vlcache calibrate`: measures what loading and computing take here, and keeps it."""

from __future__ import annotations

from vlcache_jax.common.files import check_writable
from vlcache_jax.preparation import planner
from vlcache_jax.study.calibration import calibrate
from vlcache_jax.study.report import show

_LOADS = {"link": "link its K, V", "encoder": "load its encoder rows, compute", "compute": "compute it from its pixels"}


def run(model: str, dtype: str, codec: str, tensor_parallel_size: int = 1) -> None:
    """Measures, prints what was found, and writes it where engines look for it.

    Raises:
      ValueError: see `calibrate`, or it cannot be written.
    """
    check_writable("rates", planner.folder() / "new")
    found = calibrate(model, dtype=dtype, codec=codec, tensor_parallel_size=tensor_parallel_size)
    rates, image = found.rates, found.image
    units = {
        "link a token": rates.link,
        "compute a row": rates.row,
        "encode a patch": rates.encode,
        "decode and cut a patch": rates.decode,
        "hand over 1 MB of encoder rows": 1e6 * rates.stage,
        **{f"move 1 MB of K, V from the {tier}": 1e6 * rate for tier, rate in rates.transfer.items()},
    }
    show("Of each one more", [{"what": name, "microseconds": 1e6 * seconds} for name, seconds in units.items()])
    takes = rates.costs(image)
    rows = [{"what": words, "ms": 1e3 * takes[load]} for load, words in _LOADS.items() if load in takes]
    show(f"An image of {image.tokens} tokens, of which everything is kept", rows)
    share = 1 - takes["link"] / takes["encoder"]
    advice = f"pays while less than {100 * share:.0f} % of it is computed anew" if share > 0 else "does not pay"
    print(f"\nlinking {advice}")
    print(f"written to {rates.save(found.identity)}")
