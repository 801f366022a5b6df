"""Speed and memory of captured functions, as ratios measured in one run. ``python -m benchmarks``."""
