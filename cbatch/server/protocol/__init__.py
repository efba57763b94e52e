"""Bodies of calls and answers as values, and what is wrong with them. Imports nothing of the
server's."""
