"""`python -m headway.orchestrator` is the command `headway`."""

from .cli import main

main()
