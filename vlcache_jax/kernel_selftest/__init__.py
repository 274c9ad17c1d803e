"""The kernel self-test: whether a kernel is correct on this GPU is known before this process runs it.

A kernel that is wrong, hangs or crashes on an untested GPU does so in a child process. `meet` finds the GPU through its
driver, without jax, whose first use takes the memory (`gpu`), and reads the results of the kernels: passed or failed,
with the reason, kept in the cache home per GPU, driver, versions, assembler and kernel sources (`selftest`). A kernel
without a result is checked against the reference in a child process with a time limit (`child`).
`vlcache_jax.pallas_kernels.dispatch` calls `verdict_on`, and unless the kernel passed, XLA runs.

Nothing here knows what a kernel is: the child's program, `vlcache_jax.pallas_kernels.checks`, does.
"""

from vlcache_jax.kernel_selftest.selftest import Verdict as Verdict
from vlcache_jax.kernel_selftest.selftest import meet as meet
from vlcache_jax.kernel_selftest.selftest import verdict_on as verdict_on
