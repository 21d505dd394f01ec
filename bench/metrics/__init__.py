"""One module a metric: `nar_large_files.py` holds the `METRIC` named `nar.large_files`."""
