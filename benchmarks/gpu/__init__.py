"""One command for a day with a GPU: checks the kernels on the chip, then measures, the most valuable first.

    python -m benchmarks.gpu --out results --minutes 9

It runs from the repository on jax 0.11.2, transformers and torch, with nothing installed. Each case runs in another
process, within a limit: one that hangs, or takes its process along, costs no other. Checks run four at a time. Results
stand in `gpu.json` in the folder `--out` as soon as they are there; run again, it goes on with the cases that are not
done, those that were tried before last, and after the last minute it begins none. What could not be measured is in the
table with its reason, and nothing is measured that needs a kernel which was found wrong. A folder belongs to one chip,
one version of jax and one state of the kernels. Copy `tuned.json` to `pallas_kernels/attention/`, where the kernel
reads it; a jax that cannot split registers where this one could, or the reverse, passes it over. `--rehearse` goes
through all cases on a CPU, in small, with interpreted kernels.

GPUs since Ampere other than Hopper have the kernels' portable form; `--portable` takes it on Hopper, too. It has no
statistics and nothing to tune.
"""

from vlcache_jax.benchmarks.gpu.plan import GpuCase as GpuCase
from vlcache_jax.benchmarks.gpu.plan import GpuPlan as GpuPlan
from vlcache_jax.benchmarks.gpu.running import run as run
