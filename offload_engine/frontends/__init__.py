# SPDX-License-Identifier: Apache-2.0
"""Applies the engine to models that know nothing of groups, chunks and iterations."""
