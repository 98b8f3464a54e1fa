"""qat-lora gives quantised language models their quality back."""
