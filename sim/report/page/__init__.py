"""One HTML file without dependencies that shows one run, or several for comparison."""
