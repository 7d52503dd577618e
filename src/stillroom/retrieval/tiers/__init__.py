"""The lists of an inverted index on devices, in RAM and in a file, and what a search of them takes."""
