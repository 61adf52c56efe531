"""Parts of `benchmarks/run.py budget_curve`."""
