# SPDX-License-Identifier: Apache-2.0
"""The engine inside trainers and schedules of other libraries. Import what you use by its module; nothing is here."""
