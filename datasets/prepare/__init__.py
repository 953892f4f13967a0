"""Preparing data once, before training: text to rows of tokens, here or by tasks on Ray."""

from .inputs import find_files, split_files
from .job import Prepared, PrepareProgress
from .text import TextPlan, plan_text, prepare_text

__all__ = ["PrepareProgress", "Prepared", "TextPlan", "find_files", "plan_text", "prepare_text", "split_files"]
