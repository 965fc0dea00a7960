"""Data modules: rows of public formats as batches of groups."""

from datamodules.base import DatasetInfo, GroupData
from datamodules.preference import PreferenceData
from datamodules.supervised import SupervisedData

__all__ = ["DatasetInfo", "GroupData", "PreferenceData", "SupervisedData"]
