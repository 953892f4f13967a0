"""Noticing that workers hang: heartbeats, the policy, and what follows."""
