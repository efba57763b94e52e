"""The commands `cbatch sim`, `cbatch sim capacity` and `cbatch trace`. May import all of `sim`."""
