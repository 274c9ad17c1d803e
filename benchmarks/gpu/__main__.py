from vlcache_jax.benchmarks.gpu import main

main()
