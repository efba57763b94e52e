"""How the demo models were trained. Nothing imports it."""
