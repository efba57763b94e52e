"""The commands `cbatch bench` and `cbatch report`; imports `run` and `client`."""
