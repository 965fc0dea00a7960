"""One callback per file, each importable as `callbacks.Name`."""

from callbacks.checkpoint import Checkpoint
from callbacks.doctor import Doctor
from callbacks.dynamic_beta import BatchBeta, PlateauBeta, TargetKL
from callbacks.focus_reward import FocusReward
from callbacks.fp8 import Fp8PolicyArchive, Fp8Training
from callbacks.fsdp import FSDP2
from callbacks.fusion_stability import FusionStability
from callbacks.gradient_norm_ratio import GradientNormRatio
from callbacks.nan_guard import NanGuard
from callbacks.online_head_update import OnlineHeadUpdate
from callbacks.predictions import Predictions
from callbacks.preference_dial import PreferenceDial
from callbacks.progress import Progress
from callbacks.regression_guard import RegressionGuard
from callbacks.reward_figures import RewardFigures
from callbacks.samples import Samples
from callbacks.signals import Signals
from callbacks.stages import Stages
from callbacks.stalled_head import StalledHead

__all__ = [
    "FSDP2",
    "BatchBeta",
    "Checkpoint",
    "Doctor",
    "FocusReward",
    "Fp8PolicyArchive",
    "Fp8Training",
    "FusionStability",
    "GradientNormRatio",
    "NanGuard",
    "OnlineHeadUpdate",
    "PlateauBeta",
    "Predictions",
    "PreferenceDial",
    "Progress",
    "RegressionGuard",
    "RewardFigures",
    "Samples",
    "Signals",
    "Stages",
    "StalledHead",
    "TargetKL",
]
