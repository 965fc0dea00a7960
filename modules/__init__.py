"""One LightningModule per algorithm."""

from modules.dpo import DPO
from modules.reward_model import RewardModel
from modules.sft import SFT

__all__ = ["DPO", "SFT", "RewardModel"]
