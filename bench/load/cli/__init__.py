"""The commands `cbatch bench` and `cbatch report`. Imports `run` and `client`."""
