"""Hugging Face models and what we make of them: loaded, adapted, quantised, spread over devices."""
