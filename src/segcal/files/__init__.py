"""Outputs that are whole or not there: atomic files, folders that segcal owns."""
