"""Counter-based noise, the same bits on either side: `host` and `device`."""
