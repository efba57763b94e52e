"""`cbatch check`: tests of a running server by its answers."""
