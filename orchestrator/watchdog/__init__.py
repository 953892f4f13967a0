"""Hang detection: heartbeats of the workers, the policy, and the driver that acts on it."""
