"""Models of the paper, as plain modules."""

from themis.zoo.lenet import LeNet, lenet5
from themis.zoo.resnet import CifarResNet, resnet56

__all__ = ["CifarResNet", "LeNet", "lenet5", "resnet56"]
