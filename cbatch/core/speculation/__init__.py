"""How many tokens each row looks ahead. Imports `request`."""
