"""Sampling rollouts from a model in this process, and measuring accuracy on them."""
