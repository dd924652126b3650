"""What fits share: the first pass, samples, held-out cases, penalties, and the fits of expert maps."""
