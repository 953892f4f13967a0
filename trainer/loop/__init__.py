"""The loop around the steps: epochs, limits, evaluations, requests to stop, and the state of a run."""
