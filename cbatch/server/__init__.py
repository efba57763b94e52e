"""HTTP: the OpenAI API over an engine in another process, whole or streamed."""
