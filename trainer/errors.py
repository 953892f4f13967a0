"""Errors for users to act on. All survive pickling, so the driver gets them as they were raised.

HeadwayError
├── ConfigError          a setting is invalid, or does not fit the machine
│   └── RunConflictError a run in this folder has another config, or is being trained by another process
├── DataError            the data is missing, empty, or has changed
├── StepError            a step returned no loss, or one without a gradient, or fails in a dry run
├── NonFiniteError       a loss or a gradient is NaN or infinite
├── LossSpikeError       the loss has spiked more often than max_rollbacks allows
└── CheckpointError      a checkpoint cannot be written, or no existing one can be read
    └── ResumeError      the run to resume is not the one that saved the checkpoint
"""


class HeadwayError(Exception):
    """Base class of Headway's errors."""


class ConfigError(HeadwayError, ValueError):
    """A setting is invalid, or does not fit the machine."""


class RunConflictError(ConfigError):
    """A run in this folder, or of this name, has another config, or is being trained by another process."""


class DataError(HeadwayError, ValueError):
    """The data is missing, empty, or has changed since the run began."""


class StepError(HeadwayError, TypeError):
    """A training or validation step returned no loss, or one without a gradient, or fails in a dry run."""


class NonFiniteError(HeadwayError, ArithmeticError):
    """A loss or the norm of the gradient is NaN or infinite."""


class LossSpikeError(HeadwayError, ArithmeticError):
    """The loss has spiked more often than `max_rollbacks` allows."""


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint cannot be written, or no existing one can be read."""


class ResumeError(CheckpointError):
    """The run to resume is not the one that saved the checkpoint: its config, code, data or state differs."""
