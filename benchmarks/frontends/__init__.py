"""Parts of `benchmarks/run.py frontends`."""
