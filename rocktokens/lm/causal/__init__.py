"""Knock-outs and grafts on a language model."""
