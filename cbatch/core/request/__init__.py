"""What is asked for: a request, its sampling parameters, its noise. Imports nothing."""
