"""How things are measured: repeated, interleaved, as ratios with their intervals, and how a report of it looks."""
