"""Train a network on a cohort and score it: python -m segspeed.train data=msd data.root=FOLDER train.budget=10min"""

from __future__ import annotations

from segspeed.cli import door
from segspeed.config import Config


def main(cfg: Config) -> int:
    """Train what ``cfg`` describes; 0 when the run is complete."""
    from segspeed.training import train  # torch and MONAI load here, after the settings are known to be right

    train(cfg)
    return 0


if __name__ == "__main__":
    door(main)()
