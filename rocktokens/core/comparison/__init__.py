"""Training regimes set against uniform training: what differs, and what it cost and saved."""
