"""Whether what you plug in fits: one line in your own tests, and an error that says what broke and what to do."""

from segspeed.testing.augmentation import check_augmentation
from segspeed.testing.contract import ContractError
from segspeed.testing.loss import check_loss
from segspeed.testing.metric import check_metric
from segspeed.testing.network import check_network
from segspeed.testing.source import check_source

__all__ = [
    "ContractError",
    "check_augmentation",
    "check_loss",
    "check_metric",
    "check_network",
    "check_source",
]
