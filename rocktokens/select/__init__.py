"""Which occurrences carry loss."""
