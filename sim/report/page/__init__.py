"""A run, or several side by side, as one HTML file that needs nothing else to be read."""
