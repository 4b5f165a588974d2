"""`python -m kvconvert` is the command line."""

from kvconvert.cli import main

main()
