"""Growths of what torch's caching allocator has reserved."""
