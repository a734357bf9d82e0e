"""A run turned into one self-contained HTML file."""
