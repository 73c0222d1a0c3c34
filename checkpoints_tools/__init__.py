"""Checkpoints in and out: reading other people's formats, quantizing, converting, training."""
