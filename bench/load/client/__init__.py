"""One call: its body, its bytes, its answer. Imports nothing of the load tester's."""
