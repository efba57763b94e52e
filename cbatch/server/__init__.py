"""HTTP: completions over the engine, whole or streamed."""
