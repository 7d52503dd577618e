"""Data pipeline: licensed text to rows of tokens."""
