"""The owner of a run's folder: which process may write there, and whether all ranks share the folder."""
