"""The engine in a process of its own, and the client that talks with it. Imports `engine` and
below."""
