"""What fits share: the first pass, samples, held-out cases, penalties, the experts' exact fit."""
