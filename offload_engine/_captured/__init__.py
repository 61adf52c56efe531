# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of parts of a step: what they save is copied between their replays.

`recording` numbers the captures, lets go of what their forwards have saved, and gives their backwards other addresses;
`slots` has these addresses, `program` derives from them what has to be done around each replay, and `replays` does it.
`graphs` makes torch's CUDA graphs tell of their captures and replays.
"""
