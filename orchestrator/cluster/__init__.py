"""Connecting to Ray, submitting jobs, and checking cluster launcher files."""
