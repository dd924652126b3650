"""Calibrators in 3D and label fusion on hippocampus volumes."""
