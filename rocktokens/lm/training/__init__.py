"""Distillation: the trainer, its steps, and what it writes down."""
