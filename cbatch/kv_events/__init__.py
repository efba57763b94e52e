"""Events about blocks that enter and leave the prefix cache, published in vLLM's format."""
