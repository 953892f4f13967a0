"""The errors that a person who trains can act on. All survive pickling, so they reach the driver as they were raised.

HeadwayError
├── ConfigError          what was asked for does not make sense, or does not fit the machine
├── DataError            the data is missing, empty, or not what it was
├── StepError            a step returned no loss, or a loss that nothing can be learned from
├── NonFiniteError       a loss or a gradient is NaN or infinite
├── LossSpikeError       the loss has jumped away more often than the run may go back
└── CheckpointError      a checkpoint cannot be written, or none of those present can be read
    └── ResumeError      a run that was to go on is not the one that saved the checkpoint
"""


class HeadwayError(Exception):
    """The base of all errors that Headway raises on purpose."""


class ConfigError(HeadwayError, ValueError):
    """What was asked for does not make sense, or does not fit the machine."""


class DataError(HeadwayError, ValueError):
    """The data is missing, empty, or not what it was when the run began."""


class StepError(HeadwayError, TypeError):
    """A training or validation step returned something that cannot be learned from."""


class NonFiniteError(HeadwayError, ArithmeticError):
    """A loss or the norm of the gradient is NaN or infinite."""


class LossSpikeError(HeadwayError, ArithmeticError):
    """The loss has jumped away more often than the run may go back to an earlier checkpoint."""


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint cannot be written, or none of those that are there can be read."""


class ResumeError(CheckpointError):
    """A run that was to go on from a checkpoint is not the one that saved it: what was loaded or asked for differs."""
