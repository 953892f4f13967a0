"""Training a run on Ray: the driver, its workers, failures and changes of size."""
