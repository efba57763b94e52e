"""The machine around us: cache folder, logs, heap, knobs. Imports nothing of ours."""
