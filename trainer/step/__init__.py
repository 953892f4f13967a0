"""One optimizer step: accumulate, synchronise, unscale, measure, guard, clip, step."""
