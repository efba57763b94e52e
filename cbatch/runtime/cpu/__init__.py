"""The executor for CPUs: products, layers, verification. Imports `sampling` and `model`."""
