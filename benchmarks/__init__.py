# SPDX-License-Identifier: Apache-2.0
"""Programs that measure; `run.py` starts them. None of them is installed."""
