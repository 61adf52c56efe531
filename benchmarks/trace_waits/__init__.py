# SPDX-License-Identifier: Apache-2.0
"""Host waits in chrome traces of torch's profiler."""
