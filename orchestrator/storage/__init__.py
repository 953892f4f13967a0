"""The folder of a run or a sweep, on a disk or in an object store, and its event log."""
