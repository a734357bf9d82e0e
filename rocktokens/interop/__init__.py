"""Other trainers: read their dumps, write lists for them. No trainer is imported; each format is read as a file."""
