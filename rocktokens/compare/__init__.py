"""What training without some tokens does."""
