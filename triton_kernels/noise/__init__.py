"""Counter-based noise with the same bits everywhere: `host` in torch, `device` in Triton."""
