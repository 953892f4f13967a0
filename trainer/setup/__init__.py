"""What happens once before the first step: build, freeze, initialise, and check that the ranks agree."""
