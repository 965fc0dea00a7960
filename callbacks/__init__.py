"""One callback per file, each importable as `callbacks.Name`."""

from callbacks.checkpoint import Checkpoint
from callbacks.predictions import Predictions
from callbacks.preference_dial import PreferenceDial
from callbacks.samples import Samples
from callbacks.signals import Signals

__all__ = ["Checkpoint", "Predictions", "PreferenceDial", "Samples", "Signals"]
