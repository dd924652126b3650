"""What ``benchmarks/faults.py`` runs, how it is stopped, and how its results are compared."""
