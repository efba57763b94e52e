"""The load tester, `cbatch bench`: `cli` imports `run`, which imports `client`."""
