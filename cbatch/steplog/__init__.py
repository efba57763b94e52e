"""Every input of a scheduler, written down and read again. Imports `core`."""
