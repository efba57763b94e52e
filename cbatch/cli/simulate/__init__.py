"""What `cbatch sim` is made of: options, scenarios that run anywhere, and what is printed."""
