"""Programs of a checkout that are not installed: training of the demo pair and of heads."""
