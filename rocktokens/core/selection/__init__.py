"""Which occurrences carry loss, and how much: selectors, and the rules that sample less."""
