"""Parts of the benchmark `tools/budget_curve.py`."""
