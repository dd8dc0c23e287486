"""``python -m torchtitan_diloco`` is the same as the console script ``torchtitan-diloco``."""

from torchtitan_diloco.cli import main

main()
