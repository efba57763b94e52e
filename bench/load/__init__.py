"""The load tester, `cbatch bench`. `cli` imports `run`, and `run` imports `client`."""
