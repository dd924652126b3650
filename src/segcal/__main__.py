"""``python -m segcal``."""

from segcal.cli import main

main()
