# SPDX-License-Identifier: Apache-2.0
"""How this installation of the package was built."""

from __future__ import annotations

IS_COMPILED: bool = not __file__.endswith(".py")
"""True if the core is machine code, made of its Python source when the package was installed (see the README)."""
