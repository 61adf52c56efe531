"""Parts of the benchmark `tools/bench_frontends.py`."""
