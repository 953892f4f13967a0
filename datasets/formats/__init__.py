"""Formats of data as sources of rows. Parquet, the first one, is in `sources.py`."""
