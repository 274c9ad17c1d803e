from vlcache_jax.benchmarks.gpu.running import main

if __name__ == "__main__":
    main()
