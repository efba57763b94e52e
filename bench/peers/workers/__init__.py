"""Worker processes, one per system. The Python of a peer needs the peer, but not cbatch."""
