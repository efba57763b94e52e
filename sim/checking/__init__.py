"""An executor that checks every plan and result: for tests. Imports `cbatch.core` and `cost`."""
