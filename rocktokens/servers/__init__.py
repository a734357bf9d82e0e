"""The engine's interface on vLLM servers."""
