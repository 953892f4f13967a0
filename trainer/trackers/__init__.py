"""Trackers record the metrics of a run: the base class and Headway's built-in ones."""

from .base import RunInfo, Tracker, TrackerList
from .console import ConsoleTracker
from .csv import CsvTracker
from .images import ImageFilesTracker
from .jsonl import JsonlTracker, read_records
from .mlflow import MlflowTracker
from .tensorboard import TensorBoardTracker
from .wandb import WandbTracker

__all__ = [
    "ConsoleTracker",
    "CsvTracker",
    "ImageFilesTracker",
    "JsonlTracker",
    "MlflowTracker",
    "RunInfo",
    "TensorBoardTracker",
    "Tracker",
    "TrackerList",
    "WandbTracker",
    "read_records",
]
