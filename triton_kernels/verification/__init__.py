"""Verification of drafts against logits on a GPU."""
