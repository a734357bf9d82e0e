"""Whatever touches a run directory on disk."""
