"""Who drafts on a processor: a draft model, lookups, chains of them. Imports `cpu`."""
