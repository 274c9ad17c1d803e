"""One command for a GPU: checks the kernels on the chip, then measures, the most valuable cases first.

    python -m benchmarks.gpu --out results --minutes 9

It runs from the repository on jax 0.11.2, transformers and torch, without installation. Each case runs in its own
process with a time limit, so a case that hangs or crashes does not affect the others. Four checks run at a time.

Results are in `gpu.json` in the folder `--out` as soon as they exist. The same command resumes with the cases that are
not done (those that were tried before come last), and starts none after the last minute. The table lists a reason for
each case that could not be measured. Cases that need a wrong kernel are skipped. A folder belongs to one chip, one
version of jax and one state of the kernels.

Copy `tuned.json` to `pallas_kernels/attention/`, where the kernel reads it. Its entries apply only to a jax that can
split registers exactly if this one could. `--rehearse` runs small versions of all cases on a CPU, with interpreted
kernels.

GPUs since Ampere other than Hopper run the portable kernels; `--portable` selects them on Hopper, too. They have no
attention scores and nothing to tune.
"""

from vlcache_jax.benchmarks.gpu.plan import GpuCase as GpuCase
from vlcache_jax.benchmarks.gpu.plan import GpuPlan as GpuPlan
from vlcache_jax.benchmarks.gpu.running import run as run
