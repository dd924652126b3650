"""Parts of ``benchmarks/mutation.py``."""
