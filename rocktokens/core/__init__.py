"""Pure computations: arrays in, numbers out. No files, no clock, no global random state."""
