"""Counter-based noise as device functions of Triton (`device`), and its constants (`streams`)."""
