"""Targets of ``benchmarks/fuzz.py``: what each writes, how it is damaged, and how segcal's answer is judged."""
