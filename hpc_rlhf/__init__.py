"""hpc-rlhf: RLHF post-training as a Slurm-native batch system."""

__version__ = "0.1.0"
