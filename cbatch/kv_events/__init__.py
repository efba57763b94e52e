"""What enters and leaves the prefix cache, told to gateways in vLLM's format."""
