from vlcache_jax.benchmarks.peer import main

main()
