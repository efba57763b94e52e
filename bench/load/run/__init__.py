"""A run of many calls: pacing, client processes, measurement and reports; imports `client`."""
