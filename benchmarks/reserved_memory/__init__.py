# SPDX-License-Identifier: Apache-2.0
"""Growths of what torch's caching allocator has reserved."""
