"""First contact with a chip: whether a kernel may be trusted on it is known before this process touches it.

A kernel that is wrong, hangs or crashes on a chip that nobody has tried does so in a child process. `meet` finds the
GPU through its driver, without jax, whose first use takes the memory (`chip`), and looks for the *verdicts* on the
kernels: passed or failed, with the reason, kept in the cache home per GPU, driver, versions, assembler (`toolchain`)
and kernel sources (`verdicts`). What has none is checked against the reference in a child process with a time limit
(`contact`, `child`). `vlcache_jax.pallas_kernels.dispatch` asks `verdict_on`, and without a verdict that says passed
XLA runs.

Nothing here knows what a kernel is: the child's program, `vlcache_jax.pallas_kernels.checks`, does.
"""

from vlcache_jax.kernel_selftest.selftest import Verdict as Verdict
from vlcache_jax.kernel_selftest.selftest import meet as meet
from vlcache_jax.kernel_selftest.selftest import verdict_on as verdict_on
