"""The census: from outcomes with and without a token to verdicts with their error bars."""
