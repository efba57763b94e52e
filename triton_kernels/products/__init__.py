"""Matrix products with weights; the bits of a row do not depend on other rows."""
