"""Products with weights in which the bits of a row do not depend on other rows."""
