"""The commands `cbatch sim`, `trace` and `calibrate`. Imports all the rest of `sim`."""
