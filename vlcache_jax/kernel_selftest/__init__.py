"""The kernel self-test: a check of each kernel on this GPU in a child process, before its first use.

A kernel that is wrong, hangs or crashes on an untested GPU does so in the child process. `run_selftest` finds the GPU
through its driver (`gpu`), because the first use of JAX takes the device's memory. It reads the stored results: passed
or failed, with the reason. They are stored in the cache home per GPU, driver, versions, assembler and kernel sources
(`selftest`). A kernel without a result is checked against the reference in a child process with a time limit (`child`).
`vlcache_jax.pallas_kernels.dispatch` calls `result_on`, and unless the kernel passed, XLA runs.

The package is independent of the kernels. The child's program, `vlcache_jax.pallas_kernels.checks`, runs them.
"""

from vlcache_jax.kernel_selftest.selftest import SelfTestResult as SelfTestResult
from vlcache_jax.kernel_selftest.selftest import result_on as result_on
from vlcache_jax.kernel_selftest.selftest import run_selftest as run_selftest
