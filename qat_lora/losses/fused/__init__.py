"""Loss and gradient from hidden states and output matrix, without [tokens, vocabulary]."""
