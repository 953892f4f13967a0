"""Failures of workers: the cause of one, the budgets of retries, and the policy that decides."""
