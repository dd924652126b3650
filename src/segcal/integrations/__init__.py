"""segcal in the training loops of other libraries, which are imported on first use."""
