"""Verification of drafts against logits: the kernel, and its reference, by which a CPU verifies."""
