"""Replays: requests through one or many schedulers on a virtual clock."""
