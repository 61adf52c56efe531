"""Programs that measure; `run.py` starts them. None of them is installed."""
