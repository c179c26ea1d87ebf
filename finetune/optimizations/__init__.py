"""The optimizations: plain parts that know nothing of recipes, and `apply.py`, which alone decides."""
