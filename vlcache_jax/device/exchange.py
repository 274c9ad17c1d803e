"""Whether devices reach each other, found out before anything waits for it."""

from __future__ import annotations

import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.device.mesh import Devices
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import AXIS, FIRST, WHOLE

LIMIT = 120.0  # seconds, with making NCCL's channels


def check_exchange(devices: Devices, values: int = 2**18, limit: float = LIMIT) -> float:
    """Adds something up over all devices, as each layer does.

    Args:
      values: float32 numbers that each device has.
      limit: seconds that it may take.

    Returns:
      Seconds that it takes, once all is set up: the least of five.

    Raises:
      RuntimeError: it fails, gives something wrong, or does not end.
    """
    found: list[float | BaseException] = []

    def measure() -> None:
        try:
            found.append(_measure(devices, values))
        except Exception as error:  # told by the thread that waits
            found.append(error)

    thread = threading.Thread(target=measure, name="vlcache-exchange", daemon=True)
    thread.start()
    thread.join(limit)
    if found and isinstance(found[0], float):
        return found[0]
    what = f"did not end within {limit:g} s" if not found else f"failed: {found[0]}"
    raise RuntimeError(
        f"{devices.count} devices like {devices.all[0]} must reach each other, but adding up over them {what}. "
        "NCCL_DEBUG=INFO says what NCCL does; NCCL_P2P_DISABLE=1 goes round the links between them, NCCL_SHM_DISABLE=1 "
        "round shared memory (in a container: --shm-size=1g); with tensor_parallel_size=1 one device is used"
    )


def _measure(devices: Devices, values: int) -> float:
    count = devices.count
    with split.over(devices.mesh):
        add = jax.jit(split.spread(lambda own: jax.lax.psum(own[0], AXIS), (FIRST,), WHOLE))
        own = devices.put(np.arange(count, dtype=np.float32)[:, None] + np.zeros((1, values), np.float32), FIRST)
        made = add(own)
    wrong = jnp.abs(made - count * (count - 1) / 2).max()
    if float(wrong) != 0:
        raise ValueError(f"a sum is wrong by {float(wrong)}")
    least = math.inf
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(add(own))
        least = min(least, time.perf_counter() - start)
    return least
