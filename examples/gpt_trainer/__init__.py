# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/pretrain_gpt.py`, one job each: flags, processes, model, data, steps, checkpoints, metrics."""
