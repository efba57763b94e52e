"""Any decoder that transformers knows: its modelling code, with our attention over paged KV."""
