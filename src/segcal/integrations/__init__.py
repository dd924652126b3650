"""segcal inside other people's training loops. Each module imports its library where it is used."""
