"""The reference trainer: networks, data, the loop, and what it writes."""

from segcal.training.config import LossSpec, TrainingConfig, load_config, parse_config
from segcal.training.densenet import FCDenseNet
from segcal.training.efficientnet import EfficientUNet
from segcal.training.loop import Trainer, TrainingReport, train
from segcal.training.networks import load_network
from segcal.training.packed import convert
from segcal.training.segmenter import Segmenter
from segcal.training.unet import UNet

__all__ = [
    "EfficientUNet",
    "FCDenseNet",
    "LossSpec",
    "Segmenter",
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
