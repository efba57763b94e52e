"""Many calls: paced, spread over processes, measured and reported. Imports `client`."""
