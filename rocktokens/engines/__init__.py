"""Optional engines that sample and score somewhere else."""
