"""Parts of `benchmarks/run.py gpu`."""
