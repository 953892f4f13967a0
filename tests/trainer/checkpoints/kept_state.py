"""A part of a checkpoint whose state is any value."""

from __future__ import annotations

from typing import Any


class KeptState:
    """Keeps what is loaded."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
