"""LeRobot datasets: reading, sampling for training, writing."""

from vla_platform.datasets.demonstrations import Batch, Demonstrations
from vla_platform.datasets.lerobot import LeRobotDataset, open_dataset
from vla_platform.datasets.statistics import Statistics

__all__ = ["Batch", "Demonstrations", "LeRobotDataset", "Statistics", "open_dataset"]
