"""Gradients per token type."""
