"""The loop around optimizer steps: epochs, limits, evaluations, saves, stop requests, and the state of a run."""
