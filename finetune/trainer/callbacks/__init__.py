"""Callbacks observe or stop a run; they never change a number."""
