"""On-policy distillation on TRL's trainer."""
