"""The engine in its own process, and the client that talks to it. Imports `engine` and below."""
