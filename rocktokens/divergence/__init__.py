"""Divergence of two output heads, fused."""
