"""Draft heads (EAGLE, Medusa), which read the target's hidden states, on any device."""
