"""What leaves the tool: adapters in PEFT's layout, merged dense models."""
