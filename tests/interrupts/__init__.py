# SPDX-License-Identifier: Apache-2.0
"""Interrupts at random times and places, and what has to be true behind each of them."""
