"""Continue a prompt, with a model of ours or a GGUF export."""
