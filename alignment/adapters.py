"""Whether peft wraps a model. To ask does not import peft: that takes about a second, and a run without adapters does
without it. Whatever peft has wrapped has imported it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether `model` is a PeftModel."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
