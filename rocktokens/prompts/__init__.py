"""Prompts and the checkers of their answers."""
