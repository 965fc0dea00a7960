"""One LightningModule per algorithm, each importable as `modules.Name`."""

from modules.decoupled_po import DecoupledPO
from modules.dpo import DPO
from modules.gdpo import GDPO
from modules.generalized_rpo import GeneralizedRPO
from modules.grpo import GRPO
from modules.kto import KTO
from modules.morl import MORL
from modules.online_dpo import OnlineDPO
from modules.ppo import PPO
from modules.reference_free import CPO, ORPO, SimPO
from modules.reward_model import RewardModel
from modules.sft import SFT

__all__ = [
    "CPO",
    "DPO",
    "GDPO",
    "GRPO",
    "KTO",
    "MORL",
    "ORPO",
    "PPO",
    "SFT",
    "DecoupledPO",
    "GeneralizedRPO",
    "OnlineDPO",
    "RewardModel",
    "SimPO",
]
