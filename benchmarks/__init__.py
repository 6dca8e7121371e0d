"""Scripts that measure, side by side in one run; run them from the repository: python -m benchmarks.NAME."""
