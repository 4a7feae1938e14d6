"""segspeed: from a hospital's NIfTI volumes to a Dice on the clock."""

__version__ = "0.1.0"
