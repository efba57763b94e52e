"""How many tokens each row looks ahead. Imports `prices` and `request`."""
