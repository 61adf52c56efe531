# SPDX-License-Identifier: Apache-2.0
"""Tells how this installation of the package was built."""

from __future__ import annotations

IS_COMPILED: bool = not __file__.endswith(".py")
"""True if the core was compiled from its Python source when the package was installed (see the README)."""
