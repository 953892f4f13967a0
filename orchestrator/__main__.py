"""`python -m headway.orchestrator` is the command `headway`."""

import sys

try:
    from .cli.main import main
except ModuleNotFoundError as error:
    # A job brings Headway to a node, but not the packages that it needs.
    if not error.name or error.name.startswith("headway"):
        raise
    sys.exit(
        f"headway: {sys.executable} has no package {error.name}: install Headway's requirements there, for example in "
        "the image of the nodes (`headway init docker`), or submit with --pip"
    )

main()
