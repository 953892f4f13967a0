"""Everything of a sweep that imports Ray Tune, in the driver and in the processes of the trials."""
