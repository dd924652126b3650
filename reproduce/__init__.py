"""The tables of published papers, made again by segcal: one folder for each dataset."""
