"""The command `headway` and what it prints."""
