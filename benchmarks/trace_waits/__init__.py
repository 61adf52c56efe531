"""Host waits in chrome traces of torch's profiler."""
