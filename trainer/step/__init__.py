"""One optimizer step: accumulate, synchronize, unscale, check, clip, step."""
