"""Whatever touches a language model."""
