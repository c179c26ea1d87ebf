"""Exact attention over packed rows: one signature, several backends (`backends.py`), one seam to the model
(`interface.py`)."""
