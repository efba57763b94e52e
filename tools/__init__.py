"""Parts of a checkout that are not installed: the recipe of the demo pair, a head for SmolLM2."""
