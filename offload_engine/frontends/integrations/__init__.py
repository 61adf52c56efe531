# SPDX-License-Identifier: Apache-2.0
"""Integrates the engine into trainers and schedules of other libraries. Import each module by its full name."""
