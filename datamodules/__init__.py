"""Data modules: rows of public formats as batches of groups."""

from datamodules.base import DatasetInfo, GroupData
from datamodules.difficulty import StrataConfig
from datamodules.preference import PreferenceData
from datamodules.prompts import PromptData
from datamodules.strata import DifficultyStratifiedBatchSampler
from datamodules.stream import FollowConfig
from datamodules.supervised import SupervisedData
from datamodules.unpaired import UnpairedData

__all__ = [
    "DatasetInfo",
    "DifficultyStratifiedBatchSampler",
    "FollowConfig",
    "GroupData",
    "PreferenceData",
    "PromptData",
    "StrataConfig",
    "SupervisedData",
    "UnpairedData",
]
