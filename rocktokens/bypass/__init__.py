"""Which rocks training may skip."""
