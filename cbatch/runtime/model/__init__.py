"""A checkpoint's config, weights and KV, for any device. Imports nothing of the runtime's."""
