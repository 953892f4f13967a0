"""What watches a run: the base of all callbacks, and those that come with Headway."""

from .base import Callback, CallbackList, PlainFunction

__all__ = ["Callback", "CallbackList", "PlainFunction"]
