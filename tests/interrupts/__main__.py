# SPDX-License-Identifier: Apache-2.0
"""Runs the trials of a range of seeds; prints each as a line of JSON. `tools/interrupt_check.py` starts it."""

from __future__ import annotations

import json
import logging
import sys

import torch

from tests.interrupts.trials import Trials


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # what the engine says of each abandoned step
    trials = Trials()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(trials.run(seed)), flush=True)


if __name__ == "__main__":
    main()
