"""From rows that arrive fragment by fragment to micro-batches, each of which takes rows of many fragments."""
