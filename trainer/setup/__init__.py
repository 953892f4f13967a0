"""Setup before the first step: build, freeze, initialize, and check that the ranks agree."""
