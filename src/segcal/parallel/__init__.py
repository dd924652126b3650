"""Threads and worker processes."""
