# SPDX-License-Identifier: Apache-2.0
"""Ways to use the engine on models that know nothing of groups, chunks and iterations."""
