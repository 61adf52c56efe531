"""Parts of the benchmark `tools/bench_gpu.py`."""
