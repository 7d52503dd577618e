"""From licensed text to rows of tokens."""
