"""`python -m headway.orchestrator` is the command `headway`."""

from .cli.main import main

main()
