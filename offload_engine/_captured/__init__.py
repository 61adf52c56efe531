# SPDX-License-Identifier: Apache-2.0
"""Copies what CUDA graphs of parts of a step save, between their replays.

`recording` numbers the captures, releases what their forwards have saved, and gives their backwards other addresses.
`slots` owns these addresses, `program` derives the copies around each replay, and `replays` issues them. `graphs` makes
torch's CUDA graphs report their captures and replays.
"""
