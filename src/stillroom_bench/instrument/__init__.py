"""Measurement: repeated, interleaved runs, ratios with confidence intervals, reports and comparisons."""
