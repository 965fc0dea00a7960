"""MLflow's client, for annotations only.

In a file of its own: jsonargparse runs the TYPE_CHECKING blocks of every file whose classes it reads the settings of,
and importing mlflow takes a second, also in a run without a tracker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient as Client
else:
    Client = Any

__all__ = ["Client"]
