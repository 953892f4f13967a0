"""Preparing data once, before training: text to rows of tokens and images to one size, here or by tasks on Ray."""

from .images import prepare_images
from .inputs import find_files, split_files
from .job import Prepared, PrepareProgress
from .text import TextPlan, plan_text, prepare_text

__all__ = [
    "PrepareProgress",
    "Prepared",
    "TextPlan",
    "find_files",
    "plan_text",
    "prepare_images",
    "prepare_text",
    "split_files",
]
