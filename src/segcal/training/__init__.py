"""The reference trainer: networks, data, the loop, and what it writes."""

from segcal.training.config import LossSpec, TrainingConfig, load_config, parse_config
from segcal.training.loop import Trainer, TrainingReport, train
from segcal.training.networks import UNet, load_network
from segcal.training.packed import convert

__all__ = [
    "LossSpec",
    "Trainer",
    "TrainingConfig",
    "TrainingReport",
    "UNet",
    "convert",
    "load_config",
    "load_network",
    "parse_config",
    "train",
]
