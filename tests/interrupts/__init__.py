"""Interrupts at random times and places, and what has to be true behind each of them."""
