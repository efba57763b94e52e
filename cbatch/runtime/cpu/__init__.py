"""The executor on a processor: products, layers, verification. Imports `sampling` and `model`."""
